from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Engine

from activities.lineage.activities import LineageActivities
from storage.database import session
from storage.objects import ObjectStore
from storage.tables import Run
from tasksets import open_taskset
from tests.storage import rows
from workflows.contracts import LeaseEnginesInput


@pytest.fixture
def living() -> set[str]:
    """The runs whose workflows run."""
    return {"a", "b"}


@pytest.fixture
def lineage(database: Engine, object_store: ObjectStore, tmp_path: Path, living: set[str]) -> LineageActivities:
    async def lives(run: str) -> bool:
        return run in living

    with session(database) as opened:
        rows.put_run(opened, "a")
        rows.put_run(opened, "b")
    return LineageActivities(
        database, object_store, engines=[], models_dir=tmp_path, open_taskset=open_taskset, lives=lives
    )


async def test_a_run_that_was_terminated_does_not_keep_the_engines(
    lineage: LineageActivities, database: Engine, living: set[str]
) -> None:
    assert (await lineage.lease_engines(LeaseEnginesInput(run="a"))).held_by == ""
    assert (await lineage.lease_engines(LeaseEnginesInput(run="b"))).held_by == "a"
    living.remove("a")
    assert (await lineage.lease_engines(LeaseEnginesInput(run="b"))).held_by == ""
    with session(database) as opened:
        row = opened.get(Run, "a")
        assert row is not None and row.state == "failed" and row.ended_at is not None
        assert "terminated" in row.reason


async def test_a_run_that_lives_keeps_the_engines_and_may_ask_again(lineage: LineageActivities) -> None:
    for _ in range(2):
        assert (await lineage.lease_engines(LeaseEnginesInput(run="a"))).held_by == ""
        assert (await lineage.lease_engines(LeaseEnginesInput(run="b"))).held_by == "a"
