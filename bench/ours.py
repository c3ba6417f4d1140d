"""Ours, as collection.py measures it: a TrainingRun on the bench's stack, ended as soon as its batch is cut.

Nothing here is a stand-in: the run is the product's, on the weights that `ratchet bootstrap` made. It is cancelled
before its first update is applied, so the engines carry the same weights from the first measurement to the last. What
happened is read from the rows that every run leaves. Called by collection.py, async.py and rare.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Engine
from sqlmodel import col, select
from temporalio.client import Client, WorkflowFailureError

from bench.batches import Collection, EpisodeUse, TurnUse
from bench.idle import Idle
from storage.database import session
from storage.tables import Batch, Episode, Group, Run, Turn
from workflows.contracts import VALID, Queue, RunState

PARTS = ("temporal", "s3", "docker", "prepare", "vllm", "control", "trainer", "engines", "rollout")
"""Of a stack that trains whole runs."""
LOOK_S = 0.2
ENOUGH_S = 5.0
COMPLETE = ("", "no_signal")
"""Reasons of groups all of whose siblings ended validly."""


async def start(client: Client, run: str, config: Mapping[str, Any]) -> None:
    await client.start_workflow("TrainingRun", config, id=run, task_queue=Queue.CONTROL)


async def train(client: Client, run: str, config: Mapping[str, Any], until: Callable[[], bool] = lambda: False) -> None:
    """The whole run, or until `until`, asked every few seconds, says that it is enough. Raises SystemExit where it
    fails."""
    await start(client, run, config)
    ended = asyncio.create_task(client.get_workflow_handle(run).result())
    while not ended.done():
        if await asyncio.to_thread(until):
            ended.cancel()
            return await cancel(client, run)
        await asyncio.wait([ended], timeout=ENOUGH_S)
    status = ended.result()
    if status["state"] != "finished" or status["step"] != config["training"]["steps"]:
        raise SystemExit(f"{run} ended early: {status}")


async def wait_for_batch(client: Client, database: Engine, run: str, limit_s: float) -> None:
    """Until the run's first batch is reserved. Raises SystemExit where the run ends before, or not in time."""
    deadline = time.monotonic() + limit_s
    ended = asyncio.create_task(client.get_workflow_handle(run).result())
    try:
        while _batch(database, run) is None:
            if ended.done():
                raise SystemExit(f"{run} ended before its batch was complete: {ended.exception() or ended.result()}")
            if time.monotonic() > deadline:
                raise SystemExit(f"{run}: no batch in {limit_s:.0f} s")
            await asyncio.sleep(LOOK_S)
    finally:
        ended.cancel()


async def wait_for_admission(database: Engine, run: str, limit_s: float) -> None:
    """Until the run's row says that it runs: its engines carry its weights, and groups may begin."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with session(database) as opened:
            row = opened.get(Run, run)
        if row is not None and row.state == RunState.RUNNING:
            return
        await asyncio.sleep(LOOK_S)
    raise SystemExit(f"{run} does not run after {limit_s:.0f} s")


async def cancel(client: Client, run: str) -> None:
    """End the run with all that it has in flight; returns when it has swept."""
    handle = client.get_workflow_handle(run)
    await handle.cancel()
    try:
        await handle.result()
    except WorkflowFailureError:
        return


def collected(database: Engine, run: str, idle: Idle, *, by_number: bool) -> Collection:
    """What the rows say of the run's first batch. Raises SystemExit where it has none."""
    batch = _batch(database, run)
    if batch is None:
        raise SystemExit(f"{run} has no batch")
    waited = {name: float(value) for name, value in batch.waited.items() if isinstance(value, int | float)}
    with session(database) as opened:
        groups = {row.id: row for row in opened.exec(select(Group).where(Group.run == run)).all()}
        episodes = opened.exec(select(Episode).where(Episode.run == run, col(Episode.outcome).in_(VALID))).all()
        turns = opened.exec(select(Turn).join(Episode).where(Episode.run == run).order_by(col(Turn.turn))).all()
    # The batch may have been complete a moment before it was reserved.
    began = min(group.started_at for group in groups.values())
    opened_at = min(batch.reserved_at - waited["to_trainable_batch"], began)
    uses = _uses(turns)
    return Collection(
        closed_s={
            group.number: group.closed_at - opened_at
            for group in groups.values()
            if not group.short and group.reason in COMPLETE and group.closed_at <= batch.reserved_at
        },
        episodes=[
            EpisodeUse(_number(episode.group_id), episode.ended_at - opened_at, uses[episode.id])
            for episode in episodes
            if episode.ended_at <= batch.reserved_at
        ],
        idle=idle.share,
        cpu_busy=idle.cpu_busy,
        by_number=by_number,
        began=sum(group.started_at <= batch.reserved_at for group in groups.values()),
        lead_s=waited.pop("to_trainable_batch"),
        parts=waited,
    )


def _number(group_id: str) -> int:
    """`n` of `<run>/g<n>`."""
    return int(group_id.rpartition("/g")[2])


def _uses(turns: Sequence[Turn]) -> Mapping[str, list[TurnUse]]:
    """The turns of each attempt, each with what the one before left behind."""
    found: dict[str, list[TurnUse]] = defaultdict(list)
    before: dict[str, int] = defaultdict(int)
    for turn in turns:
        found[turn.episode].append(TurnUse(before[turn.episode], turn.cached_tokens, turn.sampled_tokens))
        before[turn.episode] = turn.prompt_tokens + turn.sampled_tokens
    return found


def _batch(database: Engine, run: str) -> Batch | None:
    with session(database) as opened:
        return opened.exec(select(Batch).where(Batch.run == run)).first()
