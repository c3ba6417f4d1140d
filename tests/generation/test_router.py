"""A real HTTP router between the worker and two engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from activities.generation.activities import GenerationActivities
from activities.generation.affinity import Affinity
from activities.generation.routing import Ask, EnginePool
from storage.objects import ObjectStore
from tests.generation.fakes import FakeEngine, choice
from tests.generation.http_servers import ForwardingRouter, routing, serving
from tests.generation.test_generate import OneTask, engine, message, model, run, stored, template
from workers.parts import generation
from workers.settings import Settings
from workflows.contracts import GenerateOutput
from workflows.errors import EngineError

__all__ = ["engine", "model", "template"]


@pytest.fixture
async def engines(engine: FakeEngine) -> AsyncIterator[list[FakeEngine]]:
    other = FakeEngine("local-e1")
    other.label, other.answer = engine.label, engine.answer
    async with serving(engine, other):
        yield [engine, other]


@pytest.fixture(params=["x-session-id", "x-smg-routing-key", "x-ratchet-prefix"])
def header(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def router(engines: list[FakeEngine]) -> AsyncIterator[ForwardingRouter]:
    made = ForwardingRouter(engines, header="x-session-id")
    async with routing(made) as server:
        made.url = server.url
        yield made


@pytest.fixture
async def activities(
    router: ForwardingRouter, engines: list[FakeEngine], object_store: ObjectStore
) -> AsyncIterator[GenerationActivities]:
    async with EnginePool([each.info for each in engines], router=router.url, wait_s=2) as pool:
        yield GenerationActivities(pool, object_store, lambda _: OneTask())


def at(outs: list[GenerateOutput], session: str) -> dict[str, object]:
    """The next turn of an episode."""
    keys = [out.segment for out in outs]
    turn = len(outs)
    said = {"observation": f"turn {turn} of {session}"} if turn else {}
    return {"session": session, "attempt_id": session, "turn": turn, "segments": keys} | said


async def test_turns_go_through_the_router_which_keeps_a_session_on_one_engine(
    activities: GenerationActivities,
    router: ForwardingRouter,
    engines: list[FakeEngine],
    header: str,
    object_store: ObjectStore,
    model: Path,
) -> None:
    router.header = header
    for number in range(4):
        outs: list[GenerateOutput] = []
        for _ in range(3):
            outs.append(await run(activities, message(model, **at(outs, f"r/g1/e{number}/a0"))))
        assert len(set(router.forwarded[-3:])) == 1
        assert outs[2].cached_tokens == outs[1].prompt_tokens + outs[1].sampled_tokens - 1
        segment = stored(object_store, outs[2].segment)
        assert (segment.engine, outs[2].min_version, segment.versions[-1]) == ("router", 3, 3)
        assert segment.logprobs[-1] == -0.5
    assert len(router.forwarded) == 12
    # Labels and pressure are asked of the engines themselves.
    assert all("/weight_info" in each.calls for each in engines)


@pytest.mark.parametrize("dropped", ["token_ids", "logprobs", "weight_versions"])
async def test_what_the_router_leaves_out_of_an_answer_is_named_in_a_final_error(
    dropped: str, activities: GenerationActivities, router: ForwardingRouter, object_store: ObjectStore, model: Path
) -> None:
    router.drops = [dropped]
    with pytest.raises(
        EngineError, match=f"the router at http.*/inference/v1/generate through.*without {dropped}"
    ) as caught:
        await run(activities, message(model))
    assert not caught.value.retryable
    assert list(object_store.keys("runs/")) == []


async def test_a_router_that_knows_the_chat_alone_is_refused(
    activities: GenerationActivities, router: ForwardingRouter, model: Path
) -> None:
    router.routes = ["/v1/chat/completions"]
    with pytest.raises(EngineError, match=r"does not pass /inference/v1/generate through.*HTTP 404") as caught:
        await run(activities, message(model))
    assert not caught.value.retryable


async def test_a_router_whose_engine_is_gone_may_be_asked_again(
    activities: GenerationActivities, router: ForwardingRouter, model: Path
) -> None:
    router.engines = [FakeEngine("gone")]
    router.engines[0].info = router.engines[0].info.model_copy(update={"url": "http://127.0.0.1:9"})
    with pytest.raises(EngineError, match="HTTP 503 gone is gone") as caught:
        await run(activities, message(model))
    assert caught.value.retryable


@pytest.mark.parametrize("label", ["r:4", "unproven"])
async def test_tokens_of_weights_in_proof_wait_for_every_engine_that_may_have_made_them(
    label: str,
    activities: GenerationActivities,
    engines: list[FakeEngine],
    object_store: ObjectStore,
    model: Path,
) -> None:
    def load() -> None:
        engines[0].label = "r:4?"
        for each in engines:
            each.on_generate = lambda: None

    for each in engines:
        each.answer, each.on_generate = lambda _: choice([70], ("r:4?", 0, 1)), load
    asked = asyncio.create_task(run(activities, message(model)))
    async with asyncio.timeout(30):
        while engines[0].label != "r:4?":
            await asyncio.sleep(0.01)
        seen = engines[0].calls.count("/weight_info")
        while engines[0].calls.count("/weight_info") < seen + 2:
            await asyncio.sleep(0.01)
    assert not asked.done()
    engines[0].label = label
    if label == "r:4":
        assert stored(object_store, (await asked).segment).versions[-1] == 4
    else:
        with pytest.raises(EngineError, match="version 4 was not proven"):
            await asked
        assert list(object_store.keys("runs/")) == []


async def test_the_setting_sends_generations_to_the_router(
    router: ForwardingRouter, engines: list[FakeEngine], tmp_path: Path
) -> None:
    pairs = ",".join(f"{each.info.name}={each.info.url}" for each in engines)
    settings = Settings(home=tmp_path, router_url=router.url, engines=pairs)
    async with AsyncExitStack() as stack:
        made = await generation(settings, stack)
        async with made._pool.engine(Ask("r", Affinity("r/g1/e0/a0", "one/train/t"))) as grant:
            assert grant.client.info.url == router.url
            assert [witness.info for witness in grant.witnesses] == settings.engine_infos


async def test_the_salt_changes_with_the_weights_of_any_engine_behind_the_router(
    activities: GenerationActivities, router: ForwardingRouter, engines: list[FakeEngine], model: Path
) -> None:
    def salts() -> list[str]:
        return [request["cache_salt"] for each in engines for request in each.requests]

    await run(activities, message(model))
    await run(activities, message(model, session="r/g1/e1/a0"))
    assert len(set(salts())) == 1
    engines[1].label = "r:4"
    for each in engines:
        each.answer = lambda _: choice([70], ("r:4", 0, 1))
    async with EnginePool([each.info for each in engines], router=router.url) as pool:
        fresh = GenerationActivities(pool, activities._store, lambda _: OneTask())
        await run(fresh, message(model))
    assert len(set(salts())) == 2
