"""What serves, asked of the engines; and requests that are pinned to one version."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine
from temporalio.testing import ActivityEnvironment

from activities.generation.activities import GenerationActivities
from activities.generation.engine import EngineClient
from activities.generation.fingerprint import (
    FingerprintActivities,
    ServingWatch,
    model_facts,
    taskset_digest,
    tree_digest,
)
from storage import evaluations
from storage.database import session
from storage.objects import ObjectStore
from tasksets import open_taskset, pick
from tests.generation.fakes import FakeEngine
from tests.generation.test_generate import OneTask, message, model
from tests.generation.test_routing import ask, pool_of
from tests.generation.worlds import Publisher
from workflows.contracts import EngineInfo, FingerprintInput, FingerprintOutput, RolloutLimits, Split
from workflows.errors import EngineError

__all__ = ["model"]

LIMITS = RolloutLimits(
    temperature=0.8,
    max_turns=2,
    max_tokens_per_turn=8,
    max_tokens=32,
    context_length=64,
    step_timeout_s=5,
    time_budget_s=9,
    max_output_chars=200,
    malformed_reminders=0,
)


class Engines:
    """Two engines that carry version 3 of run r, and the activity that asks them."""

    def __init__(self, store: ObjectStore, database: Engine, folder: Path, model: Path) -> None:
        self.engines = {name: FakeEngine(name) for name in ("local-e0", "local-e1")}
        for engine in self.engines.values():
            engine.label = "r:3"
        self.model, self.database = model, database
        self.manifest = Publisher(store, folder).publish(3)
        self.activities = FingerprintActivities(store, database, open_taskset, connect=self.connect)
        self.limits = LIMITS
        self.tasks = pick(open_taskset("shell"), Split.HELD_OUT, 0, 0, 3)

    def connect(self, info: EngineInfo) -> EngineClient:
        return self.engines[info.name].client()

    async def ask(self) -> FingerprintOutput:
        return await self.activities.fingerprint(
            FingerprintInput(
                run="r",
                version=3,
                manifest=self.manifest,
                model=str(self.model),
                tasks=self.tasks,
                limits=self.limits,
                engines=[engine.info for engine in self.engines.values()],
            )
        )


@pytest.fixture
def engines(object_store: ObjectStore, database: Engine, tmp_path: Path, model: Path) -> Engines:
    return Engines(object_store, database, tmp_path / "published", model)


async def test_a_fingerprint_is_what_the_engines_say_and_what_they_are_sent(engines: Engines) -> None:
    out = await engines.ask()
    assert (out.fields["engine"], out.fields["dtype"]) == ("vllm", "float32")
    assert out.fields["temperature"] == 0.8 and out.fields["context_length"] == 64 and out.fields["taskset"] == "shell"
    for name in ("weights", "harness_digest", "chat_template", "tokenizer", "taskset_digest"):
        assert len(str(out.fields[name])) == 16, name
    assert out.engines.keys() == {"local-e0", "local-e1"} and len(set(out.engines.values())) == 1
    with session(engines.database) as opened:
        now = evaluations.serving(opened, run="r")
        assert now is not None and now.facts == {"engine": "vllm", "dtype": "float32"} and now.apart == []


@pytest.mark.parametrize("change", ["temperature", "tasks", "template", "weights"])
async def test_whatever_changes_the_result_changes_the_fingerprint(
    engines: Engines, change: str, tmp_path: Path, object_store: ObjectStore
) -> None:
    before = (await engines.ask()).fields
    match change:
        case "temperature":
            engines.limits = LIMITS.model_copy(update={"temperature": 0.0})
        case "tasks":
            engines.tasks = pick(open_taskset("shell"), Split.HELD_OUT, 0, 3, 3)
        case "template":
            folder = tmp_path / "other"
            folder.mkdir()
            for path in engines.model.iterdir():
                (folder / path.name).write_bytes(path.read_bytes())
            (folder / "chat_template.jinja").write_text("{{ messages }}")
            engines.model = folder
        case "weights":
            engines.manifest = Publisher(object_store, tmp_path / "again").publish(3, content=9)
    after = (await engines.ask()).fields
    changed = {name for name in before if before[name] != after[name]}
    names = {"tasks": "taskset_digest", "template": "chat_template"}
    assert changed == {names.get(change, change)}


async def test_an_engine_that_carries_other_weights_or_is_down_is_left_out_with_what_it_does(engines: Engines) -> None:
    engines.engines["local-e1"].label = "r:2"
    out = await engines.ask()
    assert list(out.engines) == ["local-e0"] and out.left_out == {"local-e1": "carries 'r:2'"}
    engines.engines["local-e0"].down = True
    with pytest.raises(EngineError, match=r"no engine carries version 3 of r: local-e0 does not .*carries 'r:2'"):
        await engines.ask()


async def test_weights_in_proof_are_not_the_version_yet(engines: Engines) -> None:
    engines.engines["local-e1"].label = "r:3?"
    assert "local-e1" in (await engines.ask()).left_out


async def test_engines_that_serve_differently_are_refused_with_the_fields(engines: Engines) -> None:
    engines.engines["local-e1"].facts = {"engine": "vllm", "dtype": "bfloat16"}
    out = await engines.ask()
    assert out.fields == {} and "serve differently" in out.refused
    assert out.refused.endswith("dtype float32 and bfloat16")


async def test_engines_with_other_parameters_under_one_label_are_refused(engines: Engines) -> None:
    engines.engines["local-e1"].weights = 8
    assert "hold different parameters under the same version" in (await engines.ask()).refused


async def test_the_watch_writes_down_what_an_engine_serves_when_it_changes(engines: Engines) -> None:
    engine = engines.engines["local-e0"]
    watch = ServingWatch(engines.database, [engine.info], connect=engines.connect)
    (client,) = watch._clients
    await watch.look(client)
    engine.facts, engine.label = {"dtype": "bfloat16"}, "default"
    await watch.look(client)
    with session(engines.database) as opened:
        now = evaluations.serving(opened, run="r")
        assert now is not None and now.facts["dtype"] == "float32"
    engine.label = "r:4"
    await watch.look(client)
    engine.down = True
    await watch.look(client)
    with session(engines.database) as opened:
        now = evaluations.serving(opened, run="r")
        assert now is not None and now.facts == {"dtype": "bfloat16"}


def test_a_taskset_is_its_content_wherever_it_lies_and_in_whatever_order(tmp_path: Path) -> None:
    refs = pick(open_taskset("shell"), Split.HELD_OUT, 0, 0, 4)
    tasks = [open_taskset("shell").load(ref.task_id) for ref in refs]
    digest = taskset_digest(refs, tasks)
    assert taskset_digest(refs[::-1], tasks[::-1]) == digest
    changed = [tasks[0].model_copy(update={"check": "true"}), *tasks[1:]]
    assert taskset_digest(refs, changed) != digest
    for name in ("one", "two"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "test.py").write_text("assert True")
    assert tree_digest(tmp_path / "one") == tree_digest(tmp_path / "two")
    (tmp_path / "two" / "deep" / "test.py").write_text("assert False")
    assert tree_digest(tmp_path / "one") != tree_digest(tmp_path / "two")


def test_a_template_is_read_where_the_model_has_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ a }}"}))
    inside = model_facts(tmp_path)["chat_template"]
    (tmp_path / "chat_template.jinja").write_text("{{ a }}")
    assert model_facts(tmp_path)["chat_template"] == inside
    (tmp_path / "chat_template.jinja").write_text("{{ b }}")
    assert model_facts(tmp_path)["chat_template"] != inside


# --- pinned requests ----------------------------------------------------------------------------------------------


async def test_a_pinned_request_goes_to_an_engine_that_serves_its_version() -> None:
    behind, current = FakeEngine("local-e0"), FakeEngine("local-e1")
    behind.label, current.label = "r:4", "r:5"
    async with pool_of(behind, current) as pool:
        for number in range(6):
            async with pool.engine(replace(ask(f"s{number}"), version=5)) as grant:
                assert grant.client.info.name == "local-e1"
        async with pool.engine(replace(ask("old"), version=4)) as grant:
            assert grant.client.info.name == "local-e0"


async def test_a_pinned_request_does_not_wait_long_where_every_engine_has_moved_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("activities.generation.routing.PINNED_WAIT_S", 0.2)
    engine = FakeEngine()
    engine.label = "r:6"
    async with pool_of(engine, wait_s=60) as pool:
        with pytest.raises(EngineError, match=r"no engine serves version 5 of r after 0 s: .*'r:6'") as caught:
            async with pool.engine(replace(ask("s"), version=5)):
                pass
    assert not caught.value.retryable


async def test_tokens_of_another_version_than_the_pinned_one_are_not_stored(
    object_store: ObjectStore, model: Path
) -> None:
    engine = FakeEngine()
    engine.label = "r:5"

    def swap() -> None:
        engine.label = "r:6"

    engine.on_generate = swap
    async with pool_of(engine, wait_s=0.5) as pool:
        activities = GenerationActivities(pool, object_store, lambda name: OneTask())
        with pytest.raises(EngineError):
            await ActivityEnvironment().run(activities.generate, message(model, pinned_version=5))
    assert list(object_store.keys("runs/r/")) == []


async def test_sampling_that_cuts_the_distribution_reaches_the_engine_and_is_left_out_where_it_is_off(
    object_store: ObjectStore, model: Path
) -> None:
    engine = FakeEngine()
    engine.label = "r:5"
    async with pool_of(engine) as pool:
        activities = GenerationActivities(pool, object_store, lambda name: OneTask())
        for changes in ({}, {"top_p": 0.9, "top_k": 20, "temperature": 0.0}):
            sampling = {"temperature": 0.8, "max_tokens": 4, "context_length": 512} | changes
            await ActivityEnvironment().run(activities.generate, message(model, sampling=sampling))
    plain, cut = (request["sampling_params"] for request in engine.requests)
    assert plain.keys() & {"top_p", "top_k", "min_p"} == set() and plain["temperature"] == 0.8
    assert (cut["top_p"], cut["top_k"], cut["temperature"]) == (0.9, 20, 0.0) and "min_p" not in cut
