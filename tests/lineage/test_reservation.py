"""What a batch reserves where rewards were marked as wrong: before the cut they are out, after it nothing moves."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Engine

from activities.lineage.activities import LineageActivities
from activities.training import ledger
from storage import archive, queries
from storage.database import session
from storage.objects import ObjectStore
from storage.quarantine import EPISODE, TASK, Target, put_mark
from storage.tables import Batch, Group, Run
from tasksets import open_taskset
from tests.storage import rows
from workflows.contracts import PooledGroup, ReserveBatchInput, ReserveBatchOutput


@pytest.fixture
def lineage(database: Engine, object_store: ObjectStore, tmp_path: Path) -> LineageActivities:
    """Of a run that takes groups of four, also where two are left, and has three closed ones."""
    with session(database) as opened:
        rows.put_run(opened)
        opened.get_one(Run, "r").config = {"model": "tiny", "rollout": {"group_size": 4, "short_group": "train"}}
        for number in range(3):
            rows.put_group_with_episodes(opened, number, rewards=(1.0, 1.0, 0.0, 0.0))
    return LineageActivities(database, object_store, engines=[], models_dir=tmp_path, open_taskset=open_taskset)


async def reserve(lineage: LineageActivities, *numbers: int, step: int = 1) -> ReserveBatchOutput:
    pooled = [PooledGroup(number, 0, 0.0, 0.0, False) for number in numbers]
    return await lineage.reserve_batch(ReserveBatchInput(run="r", step=step, policy_version=step - 1, groups=pooled))


def mark(database: Engine, *attempts: str, task: str = "") -> None:
    named = [(EPISODE, attempt) for attempt in attempts] + ([(TASK, task)] if task else [])
    with session(database) as opened:
        for kind, name in named:
            put_mark(opened, run="r", target=Target(kind, name, ["r"]), why="wrong", by="me")


def members(database: Engine, batch: str = "r/b1") -> list[str]:
    with session(database) as opened:
        return [member.episode for member in queries.members_of(opened, batch_id=batch)]


async def test_what_is_marked_before_the_cut_is_not_in_the_batch(lineage: LineageActivities, database: Engine) -> None:
    mark(database, "r/g0/e1/a0", "r/g2/e0/a0", "r/g2/e1/a0")
    out = await reserve(lineage, 0, 1, 2)
    assert (out.episodes, out.dropped, out.void) == (7, {"quarantined": 1}, "")
    expected = [f"r/g0/e{index}/a0" for index in (0, 2, 3)] + [f"r/g1/e{index}/a0" for index in range(4)]
    assert members(database) == expected
    assert out.reward == pytest.approx(3 / 7)
    with session(database) as opened:
        left_out = opened.get_one(Group, "r/g2")
        assert (left_out.eligible, left_out.reason) == (False, "quarantined")
        assert opened.get_one(Group, "r/g0").eligible


async def test_what_is_marked_after_the_cut_stays_in_the_batch_that_is_made_again(
    lineage: LineageActivities, database: Engine
) -> None:
    mark(database, "r/g0/e1/a0", "r/g2/e0/a0", "r/g2/e1/a0")
    first = await reserve(lineage, 0, 1, 2)
    trains = ledger.members_of(database, "r/b1")
    mark(database, task="shell/count-17")
    assert await reserve(lineage, 0, 1, 2) == first
    assert ledger.members_of(database, "r/b1") == trains
    with session(database) as opened:
        opened.get_one(Batch, "r/b1").state = "trained"
    assert ledger.members_of(database, "r/b1") == trains, "as when its step is made again on the way to a later one"


async def test_a_batch_whose_groups_are_all_marked_is_void_and_says_why(
    lineage: LineageActivities, database: Engine
) -> None:
    mark(database, task="shell/count-17")
    for _ in range(2):
        out = await reserve(lineage, 0, 1)
        assert (out.episodes, out.dropped, out.void) == (0, {"quarantined": 2}, "all its 2 groups are in quarantine")
    with session(database) as opened:
        batch = opened.get_one(Batch, "r/b1")
        assert (batch.state, batch.reason) == ("void", out.void)
        assert [opened.get_one(Group, f"r/g{number}").eligible for number in range(3)] == [False, False, True]
    assert members(database) == []


async def test_an_archived_success_that_is_marked_trains_no_further_time(
    lineage: LineageActivities, database: Engine
) -> None:
    await reserve(lineage, 0)
    with session(database) as opened:
        wrong = rows.put_group_with_episodes(opened, 3, rewards=(0.0,) * 4)
        queries.put_group(opened, run="r", result=wrong.joined_by("r/g0/e0/a0"))
    mark(database, "r/g0/e0/a0")
    out = await reserve(lineage, 1, 3, step=2)
    assert (out.episodes, out.dropped) == (4, {"quarantined": 1})
    with session(database) as opened:
        assert archive.uses_in(opened, batch_id="r/b2") == []
