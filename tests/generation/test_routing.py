from __future__ import annotations

import asyncio

import pytest

from activities.generation.routing import EnginePool
from tests.generation.fakes import FakeEngine
from workflows.errors import EngineError


def pool_of(*engines: FakeEngine, wait_s: float = 0.3) -> EnginePool:
    clients = {engine.info.name: engine.client() for engine in engines}
    return EnginePool([engine.info for engine in engines], wait_s=wait_s, connect=lambda info: clients[info.name])


@pytest.fixture
def engines() -> list[FakeEngine]:
    made = [FakeEngine(f"local-e{index}") for index in range(3)]
    for engine in made:
        engine.label = "r:4"
    return made


async def test_a_session_stays_with_its_engine_also_in_another_worker(engines: list[FakeEngine]) -> None:
    one, other = pool_of(*engines), pool_of(*reversed(engines))
    for session in ("r/g1/e0/a0", "r/g1/e0/a1", "session-1", "session-12"):
        names = {(await pool.choose("r", session)).info.name for pool in (one, other, one)}
        assert len(names) == 1


async def test_sessions_spread_over_the_engines(engines: list[FakeEngine]) -> None:
    pool = pool_of(*engines)
    chosen = [(await pool.choose("r", f"r/g{number}/e0/a0")).info.name for number in range(90)]
    assert min(chosen.count(engine.info.name) for engine in engines) > 15


async def test_only_the_sessions_of_a_lost_engine_move(engines: list[FakeEngine]) -> None:
    pool = pool_of(*engines)
    sessions = [f"s{number}" for number in range(30)]
    before = {session: await pool.choose("r", session) for session in sessions}
    lost = before["s0"]
    next(engine for engine in engines if engine.info == lost.info).down = True
    pool.suspect(lost)
    for session in sessions:
        now = await pool.choose("r", session)
        assert now is not lost
        assert before[session] in (now, lost)


@pytest.mark.parametrize("label", ["default", "unproven", "r:4?", "other:4", "r/g1:4"])
async def test_an_engine_without_proven_weights_of_the_run_gets_nothing(label: str, engines: list[FakeEngine]) -> None:
    engines[0].label = engines[1].label = label
    pool = pool_of(*engines)
    assert {(await pool.choose("r", f"s{number}")).info.name for number in range(12)} == {"local-e2"}


async def test_a_session_waits_for_an_engine_to_come_back(engines: list[FakeEngine]) -> None:
    engine = engines[0]
    engine.down = True
    pool = pool_of(engine, wait_s=30)
    waiting = asyncio.create_task(pool.choose("r", "s"))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    engine.down = False
    assert (await waiting).info == engine.info


async def test_with_no_engine_in_time_the_error_says_what_each_was_doing(engines: list[FakeEngine]) -> None:
    engines[0].down, engines[1].label, engines[2].label = True, "other:3", "r:4?"
    with pytest.raises(EngineError, match=r"ConnectError.*local-e1 carries 'other:3'.*local-e2 carries 'r:4\?'"):
        await pool_of(*engines).choose("r", "s")


async def test_many_sessions_ask_an_engine_once(engines: list[FakeEngine]) -> None:
    pool = pool_of(engines[0])
    await asyncio.gather(*(pool.choose("r", f"s{number}") for number in range(50)))
    assert engines[0].calls.count("/weight_info") == 1
