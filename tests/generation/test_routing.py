from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from activities.generation.affinity import Affinity
from activities.generation.placement import QUIET
from activities.generation.routing import Ask, Cached, EnginePool, Grant
from tests.generation.fakes import FakeEngine
from workflows.errors import EngineError


def pool_of(*engines: FakeEngine, wait_s: float = 0.3, router: str = "") -> EnginePool:
    clients = {engine.info.name: engine.client() for engine in engines}
    infos = [engine.info for engine in engines]
    return EnginePool(infos, router=router, wait_s=wait_s, connect=lambda info: clients[info.name])


def ask(session: str = "r/g1/e0/a0", prefix: str = "shell/train/count-1", last: Cached | None = None) -> Ask:
    return Ask("r", Affinity(session, prefix), last)


async def chosen(pool: EnginePool, asked: Ask) -> str:
    """The engine of a request that is over at once."""
    async with pool.engine(asked) as grant:
        return grant.client.info.name


async def held(pool: EnginePool, stack: AsyncExitStack, asked: Ask) -> Grant:
    """A request that runs until the stack ends."""
    return await stack.enter_async_context(pool.engine(asked))


@pytest.fixture
def engines() -> list[FakeEngine]:
    made = [FakeEngine(f"local-e{index}") for index in range(3)]
    for engine in made:
        engine.label = "r:4"
    return made


def named(engines: list[FakeEngine], name: str) -> FakeEngine:
    return next(engine for engine in engines if engine.info.name == name)


async def test_a_session_stays_with_its_engine_also_in_another_worker(engines: list[FakeEngine]) -> None:
    for home in ("local-e0", "local-e1", "local-e2"):
        for session in ("session-1", "session-12"):
            pools = pool_of(*engines), pool_of(*reversed(engines))
            assert {await chosen(pool, ask(session, last=Cached(home, 4))) for pool in pools} == {home}


async def test_siblings_start_on_one_engine_in_every_worker_and_prompts_spread(engines: list[FakeEngine]) -> None:
    homes = Counter[str]()
    for task in range(40):
        pools = pool_of(*engines), pool_of(*reversed(engines))
        siblings = [ask(f"r/g{task}/e{index}/a0", f"shell/train/t{task}") for index in range(4)]
        (home,) = {await chosen(pools[index % 2], sibling) for index, sibling in enumerate(siblings)}
        homes[home] += 1
    assert min(homes[engine.info.name] for engine in engines) >= 5


async def test_siblings_in_flight_start_on_one_engine_and_what_overflows_goes_on_together(
    engines: list[FakeEngine],
) -> None:
    pool = pool_of(*engines)
    async with AsyncExitStack() as stack:
        names = [(await held(pool, stack, ask(f"s{index}"))).client.info.name for index in range(2 * QUIET)]
    assert len(set(names[:QUIET])) == len(set(names[QUIET:])) == 1
    assert names[0] != names[-1]


async def test_what_other_workers_have_in_flight_counts_for_the_bound(engines: list[FakeEngine]) -> None:
    pool = pool_of(*engines)
    home = await chosen(pool, ask())
    named(engines, home).pressure["num_requests_running"] = 100
    async with AsyncExitStack() as stack, asyncio.timeout(20):
        await held(pool, stack, ask("long", "another prompt"))
        while await chosen(pool, ask()) == home:
            await asyncio.sleep(0.05)


async def test_a_turn_whose_engine_is_lost_goes_elsewhere_and_stays_there(engines: list[FakeEngine]) -> None:
    pool = pool_of(*engines)
    engines[0].down = True
    refuge = await chosen(pool, ask(last=Cached("local-e0", 4)))
    assert refuge != "local-e0"
    engines[0].down = False
    assert await chosen(pool_of(*engines), ask(last=Cached(refuge, 4))) == refuge


async def test_an_engine_that_failed_a_request_is_left_at_once(engines: list[FakeEngine]) -> None:
    pool = pool_of(*engines)
    async with pool.engine(ask(last=Cached("local-e1", 4))) as grant:
        engines[1].down = True
        grant.suspect()
    assert await chosen(pool, ask(last=Cached("local-e1", 4))) != "local-e1"


async def test_a_turn_whose_cache_went_with_a_weight_update_joins_its_siblings(engines: list[FakeEngine]) -> None:
    pool = pool_of(*engines)
    home = await chosen(pool, ask())
    elsewhere = next(engine.info.name for engine in engines if engine.info.name != home)
    assert await chosen(pool, ask(last=Cached(elsewhere, 4))) == elsewhere
    assert await chosen(pool, ask(last=Cached(elsewhere, 3))) == home


async def test_only_the_sessions_of_an_updating_engine_move(engines: list[FakeEngine]) -> None:
    engines[2].label = "r:5?"
    pool = pool_of(*engines)
    for engine in engines[:2]:
        assert await chosen(pool, ask(last=Cached(engine.info.name, 4))) == engine.info.name
    assert await chosen(pool, ask(last=Cached("local-e2", 4))) in ("local-e0", "local-e1")


@pytest.mark.parametrize("label", ["default", "unproven", "r:4?", "other:4", "r/g1:4"])
async def test_an_engine_without_proven_weights_of_the_run_gets_nothing(label: str, engines: list[FakeEngine]) -> None:
    engines[0].label = engines[1].label = label
    pool = pool_of(*engines)
    assert {await chosen(pool, ask(prefix=f"p{number}")) for number in range(12)} == {"local-e2"}


async def test_a_request_waits_for_an_engine_to_come_back(engines: list[FakeEngine]) -> None:
    engine = engines[0]
    engine.down = True
    pool = pool_of(engine, wait_s=30)
    waiting = asyncio.create_task(chosen(pool, ask()))
    while engine.calls.count("/weight_info") < 2:
        await asyncio.sleep(0.01)
    assert not waiting.done()
    engine.down = False
    assert await waiting == engine.info.name


async def test_with_no_engine_in_time_the_error_says_what_each_was_doing(engines: list[FakeEngine]) -> None:
    engines[0].down, engines[1].label, engines[2].label = True, "other:3", "r:4?"
    with pytest.raises(EngineError, match=r"ConnectError.*local-e1 carries 'other:3'.*local-e2 carries 'r:4\?'"):
        await chosen(pool_of(*engines), ask())


async def test_many_requests_ask_an_engine_once(engines: list[FakeEngine]) -> None:
    pool = pool_of(engines[0])
    await asyncio.gather(*(chosen(pool, ask(f"s{number}")) for number in range(50)))
    assert engines[0].calls.count("/weight_info") == 1


async def test_the_salt_is_one_for_all_under_the_same_weights_and_another_under_others(
    engines: list[FakeEngine],
) -> None:
    async def salt(pool: EnginePool, asked: Ask) -> str:
        async with pool.engine(asked) as grant:
            return grant.cache_salt

    engine = engines[0]
    first = await salt(pool_of(engine), ask("s1"))
    assert first == await salt(pool_of(engine), ask("s2", "another prompt", Cached("local-e0", 4)))
    engine.label = "r:5"
    assert await salt(pool_of(engine), ask("s1")) not in ("", first)
