from __future__ import annotations

import asyncio

import httpx
import pytest

from activities.generation.affinity import Affinity
from activities.generation.answers import VersionSpan
from activities.generation.engine import EngineClient
from tests.generation.fakes import FakeEngine, choice
from tests.generation.http_servers import HttpServer
from workflows.contracts import EngineInfo, FinishReason
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


async def test_a_run_of_any_name_can_be_told_to_a_router() -> None:
    engine = FakeEngine()
    await engine.client().generate([1], **ASKED, affinity=Affinity("läuft/g1/e0/a0", "shell/train/größe 1"))
    assert engine.headers[0]["x-session-id"] == "l%C3%A4uft/g1/e0/a0"
    assert engine.headers[0]["x-ratchet-prefix"] == "shell/train/gr%C3%B6%C3%9Fe%201"


async def test_figures_that_are_missing_are_the_engines_fault_and_named() -> None:
    engine = FakeEngine()
    del engine.pressure["kv_cache_usage_perc"]
    with pytest.raises(EngineError, match=r"local-e0: an answer that can't be read.*kv_cache_usage_perc"):
        await engine.client().pressure()


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


@pytest.mark.parametrize(
    ("label", "final"), [("r:4", True), ("r:5?", False), ("", False)], ids=["works", "is being loaded", "hangs"]
)
async def test_an_answer_that_takes_too_long_is_final_if_the_engine_works(label: str, final: bool) -> None:
    """The model's length is bounded in tokens, and it would take as long the next time."""
    never = asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/inference/v1/generate" or not label:
            await never.wait()
        return httpx.Response(200, json={"weight_version": label})

    server = HttpServer(answer)
    await server.start()
    client = EngineClient(EngineInfo(name="local-e0", host="local", url=server.url))
    try:
        with pytest.raises(EngineError) as caught:
            await client.generate([1], **ASKED, timeout_s=0.3)
        assert caught.value.retryable is not final
        assert ("no answer within 0.3 s (rollout.generate_timeout_s)" in str(caught.value)) is final
    finally:
        await client.close()
        server.die()


async def test_an_answer_that_was_cut_has_no_end_and_one_without_a_token_is_none() -> None:
    engine = FakeEngine()
    engine.answer = lambda _: choice([7], ("r:1", 0, 1), finish="abort")
    cut = await engine.client().generate([1], **ASKED)
    assert (cut.token_ids, cut.finish_reason) == ([7], None)
    engine.answer = lambda _: choice([], finish="abort")
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
