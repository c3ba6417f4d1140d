"""Evaluation over a real Temporal server, with scripted activities: pinned engines, and nothing mixed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import CancelledError

from tests.workflows.conftest import unique
from tests.workflows.fakes import World, final
from tests.workflows.quick_groups import QuickWorld
from tests.workflows.runs import eventually, message_of, run_json, start
from workflows.contracts import (
    EvaluationResult,
    FailureType,
    FingerprintInput,
    FingerprintOutput,
    GenerateInput,
    Queue,
    RunState,
    fingerprint_digest,
)

REQUEST = {"run": "past", "samples_per_task": 2}


async def ask(client: Client, request: Any, workflow_id: str | None = None) -> WorkflowHandle[Any, EvaluationResult]:
    return await client.start_workflow(
        "Evaluation",
        request,
        id=workflow_id or unique("asked"),
        task_queue=Queue.EPISODES,
        result_type=EvaluationResult,
    )


# --- one that was asked for ---------------------------------------------------------------------------------------


async def test_one_that_is_asked_for_leases_serves_pins_measures_and_frees_the_engines(
    temporal: Client, world: World
) -> None:
    world.engines = ["h-e0", "h-e1"]
    handle = await ask(temporal, REQUEST)
    result = await handle.result()
    assert (result.version, result.episodes, result.excluded, result.redone) == (7, 4, 0, 0)
    assert (result.mean_reward, result.low, result.high) == (0.5, 0.2, 0.8)
    assert result.fingerprint == fingerprint_digest({"dtype": "float32", "weights": "w7"})
    (opening,) = world.calls["open_evaluation"]
    assert opening.workflow_id == handle.id and opening.request["run"] == "past"
    assert [message.run for message in world.calls["lease_engines"]] == [handle.id]
    assert {(item.engine.name, item.dtype, item.context_length) for item in world.calls["serve"]} == {
        ("h-e0", "bfloat16", 64),
        ("h-e1", "bfloat16", 64),
    }
    assert {(item.engine.name, item.run, item.version, item.manifest) for item in world.calls["apply"]} == {
        ("h-e0", "past", 7, "m7"),
        ("h-e1", "past", 7, "m7"),
    }
    assert len(world.calls["fingerprint"]) == 2
    (recorded,) = world.calls["record_evaluation"]
    assert recorded.measured.evaluation_id == f"past/{handle.id}" and not recorded.measured.in_run
    assert recorded.measured.fields == {"dtype": "float32", "weights": "w7"}
    (closed,) = world.calls["close_evaluation"]
    assert (closed.workflow_id, closed.state) == (handle.id, "finished")


async def test_every_generation_is_pinned_to_the_version(temporal: Client, world: World) -> None:
    handle = await ask(temporal, REQUEST)
    await handle.result()
    messages: list[GenerateInput] = world.calls["generate"]
    assert messages and {message.pinned_version for message in messages} == {7}
    assert {message.attempt_id.rsplit("/e", 1)[0] for message in messages} == {f"past/{handle.id}"}


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({}, "run: missing; name a run, or weights by manifest"),
        ("first", "the input must be one JSON object"),
        (None, "the input must be one JSON object"),
        ({"run": "past", "task": 3}, "task: unknown field; allowed here: concurrency, manifest, "),
        ({"run": "past", "tasks": 0}, "tasks: Input should be greater than or equal to 1 (given: 0)"),
        ({"run": "past", "sampling": {"temperature": -1}}, "sampling.temperature: "),
        ({"run": "past", "sampling": {"top": 1}}, "sampling.top: unknown field; allowed here: max_tokens, "),
        ({"run": "past", "serving": {"dtype": "int3"}}, "serving.dtype: "),
        ({"run": "past", "manifest": "k"}, "manifest: it says which run and version it is"),
        ({"run": "past", "version": 1, "tasks": [], "limits": {}}, "model"),
    ],
)
async def test_a_mistake_in_the_request_ends_it_at_once_with_the_field_named(
    temporal: Client, world: World, request_: Any, said: str
) -> None:
    failure, message = await message_of(await ask(temporal, request_))
    assert failure == FailureType.INVALID_CONFIG and said in message
    assert not world.calls["open_evaluation"]


async def test_what_the_opening_finds_wrong_is_the_end_of_it(temporal: Client, world: World) -> None:
    def refuse(name: str, message: Any) -> None:
        if name == "open_evaluation":
            raise final(FailureType.INVALID_CONFIG, "run: no run 'past'")

    world.fail = refuse
    assert await message_of(await ask(temporal, REQUEST)) == (FailureType.INVALID_CONFIG, "run: no run 'past'")
    assert not world.calls["lease_engines"] and not world.calls["close_evaluation"]


async def test_it_waits_for_the_engines_of_a_run_that_goes_on_and_says_for_whom(temporal: Client, world: World) -> None:
    world.held_by = "busy"
    handle = await ask(temporal, REQUEST)
    await eventually(lambda: world.calls["lease_engines"])
    await asyncio.sleep(0.3)
    details = await handle.query("__temporal_workflow_metadata")
    assert "busy" in str(details)
    assert not world.calls["serve"]
    assert len(world.calls["open_evaluation"]) == 1
    world.held_by = ""
    await handle.result()
    assert len(world.calls["open_evaluation"]) == 2, "the run has newer versions by now"


async def test_a_cancelled_one_frees_the_engines(temporal: Client, world: World) -> None:
    world.gate = asyncio.Event()
    handle = await ask(temporal, REQUEST)
    await eventually(lambda: world.calls["generate"])
    await handle.cancel()
    with pytest.raises(WorkflowFailureError) as caught:
        await handle.result()
    assert isinstance(caught.value.cause, CancelledError)
    (closed,) = world.calls["close_evaluation"]
    assert (closed.state, closed.reason) == ("cancelled", "cancelled by request")
    assert not world.calls["record_evaluation"]


async def test_an_engine_that_does_not_come_up_is_no_part_of_it_and_without_any_it_ends(
    temporal: Client, world: World
) -> None:
    def down(name: str, message: Any) -> None:
        if name == "serve" and message.engine.name in broken:
            raise final(FailureType.ENGINE, "does not start")

    world.engines, world.fail, broken = ["h-e0", "h-e1"], down, {"h-e0"}
    await (await ask(temporal, REQUEST)).result()
    assert {message.engine.name for message in world.calls["apply"]} == {"h-e1"}
    broken.add("h-e1")
    failure, message = await message_of(await ask(temporal, REQUEST))
    assert failure == FailureType.ENGINE and "no engine serves: h-e0: does not start; h-e1: " in message
    assert world.calls["close_evaluation"][-1].state == "failed"


# --- nothing mixed ------------------------------------------------------------------------------------------------


async def test_weights_that_change_in_the_middle_are_brought_back_and_the_episodes_redone(
    temporal: Client, world: World
) -> None:
    changed = asyncio.Event()

    async def change(message: GenerateInput) -> None:
        if message.attempt_id.endswith("/e2/a0") and message.turn == 1 and not changed.is_set():
            world.version = 8
            changed.set()

    world.hold = change
    result = await (await ask(temporal, REQUEST)).result()
    assert (result.episodes, result.excluded) == (4, 0) and result.redone >= 1
    loads = [message.version for message in world.calls["apply"]]
    assert len(loads) > 1 and set(loads) == {7}
    counted = [
        record
        for record in world.calls["record_episode"]
        if record.valid and (record.min_version, record.max_version) == (7, 7)
    ]
    assert {record.episode_id.rsplit("/", 1)[1] for record in counted} == {"e0", "e1", "e2", "e3"}
    redone = {record.attempt_id for record in world.calls["record_episode"]} - {record.attempt_id for record in counted}
    assert any(attempt.endswith("/e2/a0") for attempt in redone)
    assert world.calls["record_evaluation"][-1].measured.redone == result.redone


async def test_weights_that_change_again_and_again_make_no_result(temporal: Client, world: World) -> None:
    async def change(message: GenerateInput) -> None:
        world.version = 8

    world.hold = change
    handle = await ask(temporal, REQUEST)
    await eventually(lambda: world.calls["close_evaluation"])
    failure, message = await message_of(handle)
    assert failure == FailureType.EVALUATION
    assert "weights change under it: 4 attempts at past/" in message and "are of versions 8 to 8, not 7" in message
    (recorded,) = world.calls["record_evaluation"]
    assert recorded.result.refused == message and recorded.measured.state == "refused"
    assert world.calls["close_evaluation"][-1].state == "refused"


async def test_engines_that_serve_differently_make_no_result_and_play_nothing(temporal: Client, world: World) -> None:
    world.serving = lambda message: FingerprintOutput(refused="h-e0 and h-e1 serve differently: dtype float32 and bf16")
    failure, message = await message_of(await ask(temporal, REQUEST))
    assert failure == FailureType.EVALUATION and message.startswith("h-e0 and h-e1 serve differently")
    assert not world.calls["generate"]


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("fields", "what serves changed while it was evaluated: dtype float32 -> bfloat16"),
        ("engines", "h-e0 holds other parameters than before the first episode"),
    ],
)
async def test_what_serves_otherwise_after_the_last_episode_makes_no_result(
    temporal: Client, world: World, field: str, said: str
) -> None:
    before = FingerprintOutput(fields={"dtype": "float32"}, engines={"h-e0": "p"})
    changed: dict[str, Any] = {"fields": {"dtype": "bfloat16"}, "engines": {"h-e0": "other"}}

    def serving(message: FingerprintInput) -> FingerprintOutput:
        first = len(world.calls["fingerprint"]) == 1
        return before if first else before.model_copy(update={field: changed[field]})

    world.serving = serving
    assert await message_of(await ask(temporal, REQUEST)) == (FailureType.EVALUATION, said)
    assert world.calls["record_evaluation"][-1].measured.fields == {"dtype": "float32"}


async def test_an_engine_that_was_lost_is_brought_back_before_the_next_attempt(temporal: Client, world: World) -> None:
    def lose(name: str, message: Any) -> None:
        if name == "generate" and message.attempt_id.endswith("/e1/a0"):
            raise final(FailureType.ENGINE, "no engine serves version 7 of past after 10 s")

    world.fail = lose
    result = await (await ask(temporal, REQUEST)).result()
    assert (result.episodes, result.excluded, result.redone) == (4, 0, 0)
    assert [message.version for message in world.calls["apply"]] == [7, 7]


# --- a run's own --------------------------------------------------------------------------------------------------


async def test_a_run_evaluates_its_versions_on_their_fingerprints_and_every_k(
    temporal: Client, quick_world: QuickWorld
) -> None:
    config = run_json(evaluation={"tasks": 2, "every": 2}, training={"steps": 3})
    status = await (await start(temporal, config)).result()
    assert status.state is RunState.FINISHED and status.evaluation_last is not None
    recorded = quick_world.calls["record_evaluation"]
    assert [message.result.version for message in recorded] == [0, 2, 3]
    assert [message.measured.fields["weights"] for message in recorded] == ["w0", "w2", "w3"]
    assert all(message.measured.in_run for message in recorded)
    assert [message.manifest for message in quick_world.calls["fingerprint"]][::2] == ["m0", "m2", "m3"]
    assert not quick_world.calls["open_evaluation"] and not quick_world.calls["close_evaluation"]


async def test_a_refused_evaluation_does_not_end_the_run(temporal: Client, quick_world: QuickWorld) -> None:
    quick_world.serving = lambda message: FingerprintOutput(refused="engines differ")
    config = run_json(evaluation={"tasks": 2}, training={"steps": 1})
    status = await (await start(temporal, config)).result()
    assert (status.state, status.step) == (RunState.FINISHED, 1)
    assert status.evaluation_first is None and status.evaluation_last is None
    assert [message.result.refused for message in quick_world.calls["record_evaluation"]] == ["engines differ"] * 2
