"""An answer that was cut by a weight load goes on from the tokens that it had."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from activities.generation.activities import GenerationActivities
from storage.objects import ObjectStore
from tests.generation.fakes import FakeEngine, choice
from tests.generation.policies import CHATML, make_tokenizer
from tests.generation.test_generate import OneTask, message, run
from tests.generation.test_routing import pool_of
from workflows.contracts import FinishReason, KvPlan, Segment
from workflows.errors import EngineError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(CHATML, eos="<|im_end|>").save_pretrained(folder)
    return folder


class Cutting:
    """An engine that cuts its answers and is loaded meanwhile: `plan` holds what it gives, one after the other."""

    def __init__(self, plan: list[dict[str, Any] | int]) -> None:
        self.engine, self._plan = FakeEngine(), list(plan)
        self.engine.label = "r:3"
        self.engine.answer = self._answer

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._plan.pop(0)
        assert isinstance(answer, dict)
        labels = [span["version"] for span in answer["weight_versions"]]
        self.engine.label = labels[-1] if labels else self.engine.label
        return answer


def activities_of(cutting: Cutting, store: ObjectStore) -> GenerationActivities:
    return GenerationActivities(pool_of(cutting.engine), store, lambda _: OneTask())


async def test_tokens_made_before_a_cut_are_kept_with_the_version_that_made_them(
    object_store: ObjectStore, model: Path
) -> None:
    cutting = Cutting(
        [
            choice([70, 71, 72], ("r:3", 0, 3), finish="abort"),
            choice([73], ("r:4", 0, 1), finish="abort"),
            choice([74, 75], ("r:4", 0, 1), ("r:5", 1, 2)),
        ]
    )
    out = await run(activities_of(cutting, object_store), message(model))
    segment = Segment.model_validate_json(object_store.get(out.segment or ""))
    assert segment.token_ids[-6:] == [70, 71, 72, 73, 74, 75]
    assert [version for version in segment.versions if version >= 0] == [3, 3, 3, 4, 4, 5]
    assert segment.loss_mask[-6:] == [1] * 6 and len(segment.logprobs) == len(segment.token_ids)
    assert (out.min_version, out.max_version, out.finish_reason) == (3, 5, FinishReason.STOP)


async def test_what_goes_on_is_asked_for_what_is_left_under_a_seed_of_its_own(
    object_store: ObjectStore, model: Path
) -> None:
    cutting = Cutting([choice([70, 71], ("r:3", 0, 2), finish="abort"), choice([72], ("r:3", 0, 1))])
    await run(activities_of(cutting, object_store), message(model))
    first, second = cutting.engine.requests
    assert second["token_ids"] == [*first["token_ids"], 70, 71]
    assert second["sampling_params"]["max_tokens"] == first["sampling_params"]["max_tokens"] - 2
    assert second["sampling_params"]["seed"] != first["sampling_params"]["seed"]


async def test_a_cut_after_the_last_allowed_token_is_the_end(object_store: ObjectStore, model: Path) -> None:
    ids = list(range(70, 110))
    cutting = Cutting([choice(ids, ("r:3", 0, len(ids)), finish="abort")])
    out = await run(activities_of(cutting, object_store), message(model))
    assert (out.sampled_tokens, out.finish_reason) == (40, FinishReason.LENGTH)


async def test_a_turn_was_asked_for_when_its_first_token_was(object_store: ObjectStore, model: Path) -> None:
    """Its age is counted from there: what was made in vain before is no part of it."""
    kept = Cutting([choice([70], ("r:3", 0, 1), finish="abort"), choice([71], ("r:4", 0, 1))])
    lost = Cutting([choice([], finish="abort"), choice([71], ("r:3", 0, 1))])
    for cutting, first in ((kept, 0), (lost, 1)):
        times = [time.time()]
        cutting.engine.on_generate = lambda times=times: times.append(time.time())  # type: ignore[misc]
        out = await run(activities_of(cutting, object_store), message(model))
        assert len(times) == 3 and times[first] <= out.asked_at <= times[first + 1]


async def test_tokens_of_weights_that_nobody_proved_are_dropped_with_the_cut(
    object_store: ObjectStore, model: Path
) -> None:
    cutting = Cutting([choice([70], ("unproven", 0, 1), finish="abort"), choice([71], ("r:4", 0, 1))])
    # The engine is disowned for a moment, then it serves again.
    original = cutting.engine.answer

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        assert original is not None
        given = original(body)
        cutting.engine.label = "r:4"
        return given

    cutting.engine.answer = answer
    out = await run(activities_of(cutting, object_store), message(model))
    assert (out.sampled_tokens, out.min_version) == (1, 4)


async def test_an_engine_that_cuts_before_the_first_token_is_tried_a_few_times(
    object_store: ObjectStore, model: Path
) -> None:
    cutting = Cutting([choice([], finish="abort")] * 9)
    with pytest.raises(EngineError, match="'abort'") as caught:
        await run(activities_of(cutting, object_store), message(model))
    assert caught.value.retryable
    assert len(cutting.engine.requests) == 3


async def test_a_cache_that_is_kept_has_one_salt_for_all_versions(object_store: ObjectStore, model: Path) -> None:
    engine = FakeEngine()
    engine.answer = lambda _: choice([70], (engine.label, 0, 1))
    for kv in KvPlan:
        for label in ("r:3", "r:4"):
            engine.label = label
            activities = GenerationActivities(pool_of(engine), object_store, lambda _: OneTask())
            await run(activities, message(model, kv=kv))
    salts = [request["cache_salt"] for request in engine.requests]
    by_plan = dict(zip(KvPlan, zip(salts[::2], salts[1::2], strict=True), strict=True))
    assert {kv: len(set(pair)) for kv, pair in by_plan.items()} == {KvPlan.DROP: 2, KvPlan.KEEP: 1, KvPlan.SALT: 2}


async def test_what_an_engine_found_of_weights_that_it_had_before_it_was_asked_is_made_again(
    object_store: ObjectStore, model: Path
) -> None:
    engine = FakeEngine()
    engine.label = "r:3"
    activities = GenerationActivities(pool_of(engine), object_store, lambda _: OneTask())
    engine.answer = lambda _: choice([70], (engine.label, 0, 1))
    await run(activities, message(model, kv=KvPlan.SALT))
    # Loaded since its label was read: the request comes with the salt of version 3.
    engine.label = "r:4"
    out = await run(activities, message(model, kv=KvPlan.SALT))
    first, early, late = engine.requests
    assert early["cache_salt"] == first["cache_salt"] != late["cache_salt"]
    assert (out.cached_tokens, out.min_version) == (0, 4)
