from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.generation.activities import PROOF_S, GenerationActivities
from activities.generation.harness import initial_messages
from activities.generation.loader import HOLD_S
from activities.generation.transcript import Template
from storage.objects import ObjectStore
from tasksets.base import Task
from tests.generation.fakes import FakeEngine, choice
from tests.generation.policies import CHATML, make_tokenizer
from tests.generation.test_routing import pool_of
from workflows.contracts import (
    ActionKind,
    FinishReason,
    GenerateInput,
    GenerateOutput,
    Sampling,
    Segment,
    Split,
    TaskRef,
)
from workflows.errors import EngineError

TASK = Task(id="t", kind="k", instruction="Count the cats.", setup="", check="")
SAMPLING = Sampling(temperature=0.8, max_tokens=40, context_length=512)
COMMAND = "```bash\nls\n```"

Generate = Callable[..., Any]


class OneTask:
    name = "one"

    def ids(self, split: Split) -> list[str]:
        return ["t"]

    def load(self, task_id: str) -> Task:
        return TASK


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(CHATML, eos="<|im_end|>").save_pretrained(folder)
    return folder


@pytest.fixture
def template(model: Path) -> Template:
    return Template.load(str(model))


@pytest.fixture
def engine(template: Template) -> FakeEngine:
    """Answers with one command and the end of the turn, under version 3 of run r."""
    made = FakeEngine()
    made.label = "r:3"
    ids = [*make_tokenizer(CHATML, eos="<|im_end|>").encode(COMMAND, add_special_tokens=False), template.end_of_turn]
    made.answer = lambda _: choice(ids, (made.label, 0, len(ids)))
    return made


def message(model: Path, **changes: object) -> GenerateInput:
    return GenerateInput.model_validate(
        {
            "run": "r",
            "attempt_id": "r/g1/e0/a0",
            "session": "r/g1/e0/a0",
            "turn": 0,
            "model": str(model),
            "task": TaskRef(taskset="one", split=Split.TRAIN, task_id="t"),
            "sampling": SAMPLING,
            "seed": 7,
            **changes,
        }
    )


async def run(activities: GenerationActivities, asked: GenerateInput) -> GenerateOutput:
    out: GenerateOutput = await ActivityEnvironment().run(activities.generate, asked)
    return out


def stored(store: ObjectStore, key: str | None) -> Segment:
    assert key is not None
    return Segment.model_validate_json(store.get(key))


@pytest.fixture
def activities(engine: FakeEngine, object_store: ObjectStore) -> GenerationActivities:
    return GenerationActivities(pool_of(engine), object_store, lambda _: OneTask())


async def test_the_first_turn_stores_the_prompt_masked_and_the_sampled_tokens_as_returned(
    activities: GenerationActivities, engine: FakeEngine, object_store: ObjectStore, model: Path, template: Template
) -> None:
    out = await run(activities, message(model))
    prompt = template.initial(initial_messages(TASK))
    sampled = choice_ids(engine)
    segment = stored(object_store, out.segment)
    assert out.segment == "runs/r/trajectories/g1/e0/a0/t0-1.json"
    assert segment.token_ids == engine.requests[0]["token_ids"] + sampled == prompt + sampled
    assert segment.loss_mask == [0] * len(prompt) + [1] * len(sampled)
    assert segment.versions == [-1] * len(prompt) + [3] * len(sampled)
    assert segment.logprobs == [0.0] * len(prompt) + [-0.5] * len(sampled)
    assert (segment.temperature, segment.finish_reason) == (0.8, FinishReason.STOP)
    assert (out.action.kind, out.action.command, out.text) == (ActionKind.COMMAND, "ls", COMMAND)
    assert (out.prompt_tokens, out.sampled_tokens, out.min_version, out.max_version) == (
        len(prompt),
        len(sampled),
        3,
        3,
    )


def choice_ids(engine: FakeEngine) -> list[int]:
    assert engine.answer is not None
    ids: list[int] = engine.answer({})["token_ids"]
    return ids


@pytest.mark.parametrize("fresh_worker", [False, True])
async def test_the_next_prompt_is_the_stored_ids_and_the_observation_whichever_worker_makes_it(
    fresh_worker: bool,
    activities: GenerationActivities,
    engine: FakeEngine,
    object_store: ObjectStore,
    model: Path,
    template: Template,
) -> None:
    first = await run(activities, message(model))
    if fresh_worker:
        activities = GenerationActivities(pool_of(engine), object_store, lambda _: OneTask())
    second = await run(activities, message(model, turn=1, segments=[first.segment], observation="(no output)"))
    added = template.continuation(template.end_of_turn, {"role": "user", "content": "(no output)"})
    earlier = stored(object_store, first.segment).token_ids
    assert engine.requests[1]["token_ids"] == earlier + added
    assert stored(object_store, second.segment).token_ids == added + choice_ids(engine)
    assert second.prompt_tokens == len(earlier) + len(added)


async def test_the_experts_of_each_token_are_asked_for_once_and_kept_with_the_turn(
    activities: GenerationActivities, engine: FakeEngine, object_store: ObjectStore, model: Path, tmp_path: Path
) -> None:
    """The last token of an answer goes through the layers in the next turn only."""
    model = Path(shutil.copytree(model, tmp_path / "mixture"))
    (model / "config.json").write_text(json.dumps({"num_experts": 8}))
    plain, told = engine.answer, iter(("first", "second"))
    assert plain is not None
    engine.answer = lambda body: plain(body) | {"routed_experts": next(told)}
    first = await run(activities, message(model))
    second = await run(activities, message(model, turn=1, segments=[first.segment], observation="(no output)"))
    starts = [request["sampling_params"]["routed_experts_prompt_start"] for request in engine.requests]
    assert starts == [0, len(stored(object_store, first.segment).token_ids) - 1]
    assert [stored(object_store, out.segment).routed_experts for out in (first, second)] == ["first", "second"]


async def test_a_prompt_without_room_is_answered_without_the_engine(
    activities: GenerationActivities, engine: FakeEngine, model: Path
) -> None:
    out = await run(activities, message(model, sampling=Sampling(temperature=1, max_tokens=4, context_length=16)))
    assert (out.finish_reason, out.segment, out.sampled_tokens) == (FinishReason.CONTEXT_FULL, None, 0)
    assert engine.requests == []


async def test_an_answer_gets_what_the_context_leaves(
    activities: GenerationActivities, engine: FakeEngine, model: Path, template: Template
) -> None:
    length = len(template.initial(initial_messages(TASK)))
    sampling = Sampling(temperature=1, max_tokens=40, context_length=length + 9)
    await run(activities, message(model, sampling=sampling))
    assert engine.requests[0]["sampling_params"]["max_tokens"] == 9
    assert engine.requests[0]["sampling_params"]["stop_token_ids"] == [template.end_of_turn]


async def test_an_answer_over_a_weight_update_carries_the_version_of_each_token(
    activities: GenerationActivities, engine: FakeEngine, object_store: ObjectStore, model: Path
) -> None:
    engine.answer = lambda _: choice([70, 71, 72], ("r:3", 0, 1), ("r:4", 1, 3))
    out = await run(activities, message(model))
    assert stored(object_store, out.segment).versions[-3:] == [3, 4, 4]
    assert (out.min_version, out.max_version) == (3, 4)


async def test_tokens_of_weights_in_proof_wait_for_the_proof(
    activities: GenerationActivities, engine: FakeEngine, object_store: ObjectStore, model: Path
) -> None:
    engine.answer = lambda _: choice([70, 71], ("r:3", 0, 1), ("r:4?", 1, 2))
    # In proof once the request is there: before that the engine is in rotation.
    engine.on_generate = lambda: setattr(engine, "label", "r:4?")
    asked = asyncio.create_task(run(activities, message(model)))
    await asyncio.sleep(0.3)
    assert not asked.done()
    engine.label = "r:4"
    assert stored(object_store, (await asked).segment).versions[-2:] == [3, 4]


@pytest.mark.parametrize("label", ["unproven", "default", "other:4"])
async def test_tokens_whose_weights_are_disowned_are_discarded(
    label: str, activities: GenerationActivities, engine: FakeEngine, object_store: ObjectStore, model: Path
) -> None:
    engine.answer = lambda _: choice([70], ("r:4?", 0, 1))
    engine.on_generate = lambda: setattr(engine, "label", label)
    with pytest.raises(EngineError) as caught:
        await run(activities, message(model))
    assert caught.value.retryable
    assert list(object_store.keys("runs/")) == []


def test_a_disowned_engine_stays_so_for_longer_than_anybody_waits_for_a_proof() -> None:
    assert HOLD_S > PROOF_S


@pytest.mark.parametrize("label", ["other:3", "default", "unproven"])
async def test_tokens_of_other_weights_are_discarded(
    label: str, activities: GenerationActivities, engine: FakeEngine, object_store: ObjectStore, model: Path
) -> None:
    engine.answer = lambda _: choice([70, 71], ("r:3", 0, 1), (label, 1, 2))
    with pytest.raises(EngineError, match="not of r") as caught:
        await run(activities, message(model))
    assert caught.value.retryable
    assert list(object_store.keys("runs/")) == []


async def test_a_lost_engine_costs_the_answer_of_another_one_not_the_try(
    engine: FakeEngine, object_store: ObjectStore, model: Path
) -> None:
    other = FakeEngine("local-e1")
    other.label, other.answer = "r:3", engine.answer
    activities = GenerationActivities(pool_of(engine, other), object_store, lambda _: OneTask())
    used = (await run(activities, message(model))).engine
    dead, alive = (engine, other) if used == "local-e0" else (other, engine)
    dead.down = True
    assert (await run(activities, message(model))).engine == alive.info.name


def two_engines(engine: FakeEngine) -> tuple[FakeEngine, FakeEngine]:
    other = FakeEngine("local-e1")
    other.label, other.answer = engine.label, engine.answer
    return engine, other


@pytest.mark.parametrize("home", [0, 1])
async def test_an_episode_of_five_turns_stays_with_its_engine_and_finds_all_it_said_in_its_cache(
    home: int, engine: FakeEngine, object_store: ObjectStore, model: Path
) -> None:
    engines = two_engines(engine)
    engines[1 - home].down = True
    asked, outs = message(model), list[GenerateOutput]()
    for turn in range(5):
        # Each turn in a worker of its own: nothing is remembered but what the segments say.
        activities = GenerationActivities(pool_of(*engines), object_store, lambda _: OneTask())
        keys = [out.segment for out in outs]
        changes = {"turn": turn, "segments": keys, "observation": f"file {turn}" if turn else None}
        outs.append(await run(activities, asked.model_copy(update=changes)))
        engines[1 - home].down = False
    assert {out.engine for out in outs} == {engines[home].info.name}
    for before, after in pairwise(outs):
        # All but the last sampled token, which no engine has put in.
        assert after.cached_tokens == before.prompt_tokens + before.sampled_tokens - 1


async def test_a_sibling_finds_the_prompt_in_the_cache_and_an_episode_after_a_weight_load_does_not(
    engine: FakeEngine, object_store: ObjectStore, model: Path
) -> None:
    engines = two_engines(engine)
    activities = GenerationActivities(pool_of(*engines), object_store, lambda _: OneTask())
    first = await run(activities, message(model))
    sibling = await run(activities, message(model, session="r/g1/e1/a0", attempt_id="r/g1/e1/a0", seed=8))
    assert (first.cached_tokens, sibling.cached_tokens) == (0, sibling.prompt_tokens - 1)
    assert first.engine == sibling.engine
    # A load that forgot to clear the cache: the salt is the second wall.
    for each in engines:
        each.label = "r:4"
    activities = GenerationActivities(pool_of(*engines), object_store, lambda _: OneTask())
    late = await run(activities, message(model, session="r/g1/e2/a0", attempt_id="r/g1/e2/a0", seed=9))
    assert (late.cached_tokens, late.min_version) == (0, 4)


async def test_the_session_goes_with_each_request(
    activities: GenerationActivities, engine: FakeEngine, model: Path
) -> None:
    await run(activities, message(model, session="r/g1/e0/a0"))
    sent = engine.headers[0]
    assert sent["x-session-id"] == sent["x-smg-routing-key"] == "r/g1/e0/a0"
    assert sent["x-ratchet-prefix"] == "one/train/t"


async def test_waiting_for_an_engine_is_queue_time_and_not_generation(
    engine: FakeEngine, object_store: ObjectStore, model: Path
) -> None:
    pool = pool_of(engine, wait_s=30)
    activities = GenerationActivities(pool, object_store, lambda _: OneTask())
    engine.label = "r:3?"
    began = time.monotonic()
    asked = asyncio.create_task(run(activities, message(model)))
    while engine.calls.count("/weight_info") < 3:
        await asyncio.sleep(0.01)
    engine.label = "r:3"
    out = await asked
    whole = time.monotonic() - began
    assert out.timing.queue_s > 0.5
    assert out.timing.queue_s + out.timing.run_s <= whole


async def test_cancelling_ends_the_request(
    activities: GenerationActivities, engine: FakeEngine, object_store: ObjectStore, model: Path
) -> None:
    engine.delay_s = 60
    environment = ActivityEnvironment()
    asked = asyncio.ensure_future(environment.run(activities.generate, message(model)))
    while not engine.requests:
        await asyncio.sleep(0.01)
    environment.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert list(object_store.keys("runs/")) == []
