"""How many requests a worker lets go to an engine, and in which order the others wait."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from activities.generation.pressure import FIRST
from activities.generation.routing import Ask, Cached, EnginePool
from tests.generation.fakes import FakeEngine
from tests.generation.test_routing import ask, held, pool_of


@pytest.fixture
def engine() -> FakeEngine:
    made = FakeEngine()
    made.label = "r:4"
    return made


@pytest.fixture
async def pool(engine: FakeEngine) -> AsyncIterator[EnginePool]:
    async with pool_of(engine, wait_s=30) as opened:
        yield opened


class Crowd:
    """Requests over one pool: `running` in the order in which they were let go."""

    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool
        self.running: list[str] = []
        self.waited: dict[str, float] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.ends: dict[str, asyncio.Event] = {}

    async def _request(self, asked: Ask) -> None:
        async with self.pool.engine(asked) as grant:
            self.running.append(asked.affinity.session)
            self.waited[asked.affinity.session] = grant.waited_s
            await self.ends[asked.affinity.session].wait()

    def send(self, asked: Ask) -> None:
        self.ends[asked.affinity.session] = asyncio.Event()
        self.tasks[asked.affinity.session] = asyncio.create_task(self._request(asked))

    async def until(self, count: int) -> None:
        """Until that many have been let go."""
        async with asyncio.timeout(30):
            while len(self.running) < count:
                await asyncio.sleep(0.01)

    async def end(self, session: str) -> None:
        self.ends[session].set()
        await self.tasks[session]

    async def empty(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


@pytest.fixture
async def crowd(pool: EnginePool) -> AsyncIterator[Crowd]:
    made = Crowd(pool)
    yield made
    await made.empty()


def limit(pool: EnginePool, to: int) -> None:
    """As pressure would set it."""
    pool._doors[0].limit = to


async def queued(pool: EnginePool, count: int) -> None:
    async with asyncio.timeout(30):
        while len(pool._waiting) < count:
            await asyncio.sleep(0.01)


async def test_requests_above_the_limit_wait_in_the_worker_and_go_when_others_end(
    pool: EnginePool, crowd: Crowd, engine: FakeEngine
) -> None:
    engine.pressure["num_requests_waiting"] = 1
    limit(pool, 2)
    for number in range(5):
        crowd.send(ask(f"s{number}"))
    await crowd.until(2)
    await queued(pool, 3)
    for number in range(3):
        await crowd.end(crowd.running[number])
        await crowd.until(number + 3)
        assert pool._doors[0].in_flight == 2
    assert crowd.waited["s0"] < crowd.waited["s4"]


async def test_who_waits_goes_by_priority_then_warm_cache_then_age(
    pool: EnginePool, crowd: Crowd, engine: FakeEngine
) -> None:
    engine.pressure["num_requests_waiting"] = 1
    limit(pool, 1)
    crowd.send(ask("running"))
    await crowd.until(1)
    warm = Cached("local-e0", 4)
    for asked in (
        replace(ask("young, first turn"), started_at=9),
        replace(ask("old, first turn"), started_at=1),
        replace(ask("young, later turn", last=warm), started_at=8),
        replace(ask("old, later turn", last=warm), started_at=2),
        replace(ask("evaluation"), started_at=20, priority=-1),
    ):
        crowd.send(asked)
    await queued(pool, 5)
    for number in range(5):
        await crowd.end(crowd.running[-1])
        await crowd.until(number + 2)
    assert crowd.running[1:] == [
        "evaluation",
        "old, later turn",
        "young, later turn",
        "old, first turn",
        "young, first turn",
    ]


async def test_a_request_that_is_cancelled_while_it_waits_or_runs_holds_no_place(
    pool: EnginePool, crowd: Crowd, engine: FakeEngine
) -> None:
    engine.pressure["num_requests_waiting"] = 1
    limit(pool, 1)
    for session in ("runs", "waits", "last"):
        crowd.send(ask(session))
    await crowd.until(1)
    await queued(pool, 2)
    for session in ("waits", "runs"):
        crowd.tasks[session].cancel()
    await crowd.until(2)
    assert crowd.running == ["runs", "last"]
    await crowd.end("last")
    assert (pool._doors[0].in_flight, pool._waiting) == (0, [])


async def test_a_limit_that_is_used_up_rises_while_there_is_no_pressure(pool: EnginePool, crowd: Crowd) -> None:
    for number in range(FIRST + 8):
        crowd.send(ask(f"s{number}"))
    await crowd.until(FIRST + 8)
    assert pool._doors[0].limit > FIRST


async def test_preemptions_and_a_full_cache_lower_the_limit(pool: EnginePool, crowd: Crowd, engine: FakeEngine) -> None:
    for number in range(20):
        crowd.send(ask(f"s{number}"))
    await crowd.until(20)
    async with asyncio.timeout(30):
        while "/metrics" not in engine.calls:
            await asyncio.sleep(0.01)
        engine.pressure["num_preemptions_total"] += 3
        while pool._doors[0].limit != 14:
            await asyncio.sleep(0.01)
        for number in range(10):
            await crowd.end(f"s{number}")
        engine.pressure["kv_cache_usage_perc"] = 0.97
        while pool._doors[0].limit != 7:
            await asyncio.sleep(0.01)


async def test_what_a_weight_load_preempts_is_no_pressure(pool: EnginePool, crowd: Crowd, engine: FakeEngine) -> None:
    for number in range(20):
        crowd.send(ask(f"s{number}"))
    await crowd.until(20)
    async with asyncio.timeout(30):
        while "/metrics" not in engine.calls:
            await asyncio.sleep(0.01)
        engine.label = "r:5"
        engine.pressure["num_preemptions_total"] += 20
        seen = engine.calls.count("/metrics")
        while engine.calls.count("/metrics") < seen + 3:
            await asyncio.sleep(0.01)
    assert pool._doors[0].limit == FIRST


async def test_without_figures_the_limit_is_static_and_the_log_says_so_once(
    pool: EnginePool, crowd: Crowd, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.fail["/metrics"] = 404
    with caplog.at_level(logging.WARNING):
        for number in range(FIRST + 1):
            crowd.send(ask(f"s{number}"))
        async with asyncio.timeout(30):
            while engine.calls.count("/metrics") < 3:
                await asyncio.sleep(0.01)
    assert (len(crowd.running), pool._doors[0].limit) == (FIRST, FIRST)
    (said,) = [record.getMessage() for record in caplog.records if "pressure" in record.getMessage()]
    assert "at most 32 requests in flight" in said


async def test_waiting_for_room_has_no_end_where_waiting_for_an_engine_has_one(engine: FakeEngine) -> None:
    engine.pressure["num_requests_waiting"] = 1
    async with pool_of(engine, wait_s=0.2) as pool, AsyncExitStack() as stack:
        limit(pool, 1)
        async with pool.engine(ask("runs")):
            waits = asyncio.create_task(held(pool, stack, ask("waits")))
            seen = engine.calls.count("/weight_info")
            async with asyncio.timeout(30):
                while engine.calls.count("/weight_info") < seen + 3:
                    await asyncio.sleep(0.01)
            assert not waits.done()
        assert (await waits).waited_s > 0.2


async def test_figures_are_read_only_while_requests_wait_or_run(pool: EnginePool, engine: FakeEngine) -> None:
    async with pool.engine(ask()):
        async with asyncio.timeout(30):
            while "/metrics" not in engine.calls:
                await asyncio.sleep(0.01)
    async with asyncio.timeout(30):
        while pool._watching is not None and not pool._watching.done():
            await asyncio.sleep(0.01)


async def test_a_warm_turn_goes_elsewhere_once_its_patience_is_spent(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.generation.placement.PATIENCE_S", 0.5)
    other = FakeEngine("local-e1")
    other.label = "r:4"
    engine.pressure["num_requests_waiting"] = 1
    async with pool_of(engine, other) as pool, AsyncExitStack() as stack:
        limit(pool, 1)
        warm = Cached("local-e0", 4)
        assert (await held(pool, stack, ask("one", last=warm))).client.info == engine.info
        moved = await held(pool, stack, ask("two", last=warm))
        assert moved.client.info == other.info
        assert moved.waited_s >= 0.5
