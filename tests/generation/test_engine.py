from __future__ import annotations

import httpx
import pytest

from activities.generation.engine import VersionSpan
from tests.generation.fakes import FakeEngine, choice
from workflows.contracts import FinishReason
from workflows.errors import EngineError

ASKED = {"temperature": 0.7, "max_tokens": 3, "seed": 5, "stop_token_ids": [2]}


async def test_an_answer_holds_ids_logprobs_and_the_version_spans_of_the_engine() -> None:
    engine = FakeEngine()
    engine.answer = lambda _: choice([7, 8, 2], ("r:1", 0, 2), ("r:2", 2, 3))
    answer = await engine.client().generate([1, 2, 3], **ASKED, priority=4, cache_salt="s")
    assert (answer.token_ids, answer.logprobs) == ([7, 8, 2], [-0.5] * 3)
    assert answer.spans == [VersionSpan("r:1", 0, 2), VersionSpan("r:2", 2, 3)]
    assert answer.finish_reason is FinishReason.STOP
    sent = engine.requests[0]
    assert (sent["token_ids"], sent["priority"], sent["cache_salt"]) == ([1, 2, 3], 4, "s")
    assert sent["sampling_params"] == {**ASKED, "logprobs": 0, "detokenize": False}


@pytest.mark.parametrize(("status", "retryable"), [(400, False), (404, False), (500, True), (503, True)])
async def test_a_refusal_is_final_and_a_failure_is_not(status: int, retryable: bool) -> None:
    engine = FakeEngine()
    engine.fail["/inference/v1/generate"] = status
    with pytest.raises(EngineError, match=f"HTTP {status} told to fail") as caught:
        await engine.client().generate([1], **ASKED)
    assert caught.value.retryable is retryable


async def test_an_engine_that_does_not_answer_is_named() -> None:
    engine = FakeEngine()
    engine.down = True
    with pytest.raises(EngineError, match=r"local-e0 /weight_info: ConnectError connection refused") as caught:
        await engine.client().label()
    assert caught.value.retryable
    assert not await engine.client().healthy()


async def test_an_aborted_answer_is_no_answer() -> None:
    engine = FakeEngine()
    engine.answer = lambda _: choice([7], ("r:1", 0, 1), finish="abort")
    with pytest.raises(EngineError, match="'abort'"):
        await engine.client().generate([1], **ASKED)


@pytest.mark.parametrize("spans", [[], [("r:1", 0, 1)], [("r:1", 1, 2)]])
async def test_a_token_without_a_version_is_no_answer(spans: list[tuple[str, int, int]]) -> None:
    engine = FakeEngine()
    engine.answer = lambda _: choice([7, 8], *spans)
    with pytest.raises(EngineError, match="weight version"):
        await engine.client().generate([1], **ASKED)


async def test_a_score_is_one_logprob_per_token_and_zero_for_the_first() -> None:
    engine = FakeEngine()
    assert await engine.client().score([1, 2, 3]) == [0.0, engine.score(2), engine.score(3)]


async def test_error_pages_that_are_no_json_are_quoted() -> None:
    engine = FakeEngine()

    async def page(_: httpx.Request) -> httpx.Response:
        return httpx.Response(502, text="bad gateway")

    engine.handle = page  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="bad gateway"):
        await engine.client().label()
