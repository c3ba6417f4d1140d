"""The worker's interceptor beats for its activities: each beat is a call and a write on the server."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from datetime import timedelta
from typing import Any

from temporalio.testing import ActivityEnvironment

from workers.temporal import beating


def environment(timeout: timedelta | None) -> tuple[ActivityEnvironment, list[Any]]:
    made, beats = ActivityEnvironment(), list[Any]()
    made.info = dataclasses.replace(ActivityEnvironment.default_info(), heartbeat_timeout=timeout)
    made.on_heartbeat = lambda *details: beats.append(details)
    return made, beats


async def test_an_activity_that_ends_soon_costs_no_beat() -> None:
    made, beats = environment(timedelta(seconds=60))

    async def short() -> None:
        async with beating():
            await asyncio.sleep(0)

    await made.run(short)
    assert beats == []


async def test_a_long_activity_beats_and_names_its_host() -> None:
    made, beats = environment(timedelta(seconds=0.03))

    async def long() -> None:
        async with beating():
            while len(beats) < 2:
                await asyncio.sleep(0.005)

    await asyncio.wait_for(made.run(long), 30)
    assert beats[0][0]["pid"] == os.getpid()


async def test_an_activity_without_a_heartbeat_time_out_needs_none() -> None:
    made, beats = environment(None)

    async def short() -> None:
        async with beating():
            await asyncio.sleep(0)

    await made.run(short)
    assert beats == []
