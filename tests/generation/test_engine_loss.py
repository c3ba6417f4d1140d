"""Engines on real ports that die while episodes are in mid-turn."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from activities.generation.activities import GenerationActivities
from activities.generation.routing import EnginePool
from storage.objects import ObjectStore
from tests.generation.fakes import FakeEngine
from tests.generation.http_servers import serving
from tests.generation.test_generate import OneTask, engine, message, model, run, template
from workflows.contracts import GenerateOutput

__all__ = ["engine", "model", "template"]
EPISODES = 12
TURNS = 4


@pytest.fixture
def engines(engine: FakeEngine) -> list[FakeEngine]:
    made = [engine, FakeEngine("local-e1"), FakeEngine("local-e2")]
    for each in made:
        each.label, each.answer, each.delay_s = engine.label, engine.answer, 0.05
    return made


async def episode(activities: GenerationActivities, model: Path, number: int) -> list[GenerateOutput]:
    """One try of each turn: an engine's death is not the activity's failure."""
    session, outs = f"r/g{number // 4}/e{number % 4}/a0", list[GenerateOutput]()
    for turn in range(TURNS):
        asked = message(
            model,
            session=session,
            attempt_id=session,
            turn=turn,
            segments=[out.segment for out in outs],
            observation="ok" if turn else None,
        )
        outs.append(await run(activities, asked))
    return outs


async def test_when_an_engine_is_killed_no_episode_is_lost_and_those_that_moved_stay_where_they_went(
    engines: list[FakeEngine], object_store: ObjectStore, model: Path
) -> None:
    async with (
        serving(*engines) as servers,
        EnginePool([each.info for each in engines], wait_s=30) as pool,
    ):
        activities = GenerationActivities(pool, object_store, lambda _: OneTask())
        playing = [asyncio.create_task(episode(activities, model, number)) for number in range(EPISODES)]
        async with asyncio.timeout(60):
            while sum(len(each.requests) for each in engines) < EPISODES + 6:
                await asyncio.sleep(0.01)
            # Every episode is now in mid-turn: what is killed has answers under way.
            for each in engines:
                each.paused = True
            in_flight = {each.info.name: 0 for each in engines}
            while sum(in_flight.values()) < sum(not one.done() for one in playing):
                await asyncio.sleep(0.01)
                in_flight = {door.name: door.in_flight for door in pool._doors}
        busiest = max(engines, key=lambda each: in_flight[each.info.name])
        lost = in_flight[busiest.info.name]
        servers[engines.index(busiest)].die()
        for each in engines:
            each.paused = False
        played = await asyncio.wait_for(asyncio.gather(*playing), 120)
    assert lost > 0
    for outs in played:
        assert [out.sampled_tokens > 0 for out in outs] == [True] * TURNS
        places = [out.engine for out in outs]
        # Each goes on where its cache is, and leaves it for a death alone.
        changes = [index for index in range(1, TURNS) if places[index] != places[index - 1]]
        assert all(places[index - 1] == busiest.info.name for index in changes)
        assert len(changes) <= 1
    assert busiest.info.name not in {outs[-1].engine for outs in played}
    # Of what was under way some may not have reached it yet.
    unanswered = len(busiest.requests) - sum(out.engine == busiest.info.name for outs in played for out in outs)
    assert 0 < unanswered <= lost


async def test_a_turn_outlasts_the_death_of_every_engine_until_one_is_back(
    engines: list[FakeEngine], object_store: ObjectStore, model: Path
) -> None:
    lone = engines[0]
    async with serving(lone) as servers, EnginePool([lone.info], wait_s=30) as pool:
        activities = GenerationActivities(pool, object_store, lambda _: OneTask())
        lone.delay_s = 60
        asked = asyncio.create_task(run(activities, message(model)))
        async with asyncio.timeout(30):
            while not lone.requests:
                await asyncio.sleep(0.01)
        servers[0].die()
        lone.delay_s = 0
        port = int(lone.info.url.rsplit(":", 1)[1])
        back = await asyncio.start_server(servers[0]._serve, "127.0.0.1", port)
        assert (await asyncio.wait_for(asked, 60)).sampled_tokens > 0
        back.close()
