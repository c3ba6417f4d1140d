"""A run of bench/scale.py in small: real workflows and lineage, simulated work, most groups told and not played."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from sqlmodel import col, func, select
from temporalio.client import Client
from temporalio.worker import Worker

from activities.lineage.runs import RunControlActivities
from bench import scale
from bench.sampled_group import MARK, SampledGroup
from bench.simulated import HOST, SimulatedWork, lineage_activities
from storage.database import open_database, session
from storage.tables import BatchMember, Episode, Turn
from storage.tables import Group as GroupRow
from tests.workflows.conftest import temporal as temporal
from tests.workflows.conftest import unique
from workers.parts import methods
from workflows.contracts import Queue, RunState, engine_queue
from workflows.episode import Episode as EpisodeWorkflow
from workflows.registry import ON_CONTROL

TURNS = 2


@pytest.fixture
def folder(tmp_path: Path, migrated: Path) -> Path:
    shutil.copy(migrated, tmp_path / "ratchet.db")
    scale._model_folder(tmp_path / "models" / "simulated")
    return tmp_path


@pytest.mark.parametrize(("episodes", "every"), [(64, 4), (512, 32)])
async def test_a_run_carries_all_episodes_and_plays_its_share_of_them(
    temporal: Client, folder: Path, episodes: int, every: int
) -> None:
    """The larger one has two steps: what an older version made would not train."""
    run = unique("scale") + f"{MARK}{every}"
    lineage = lineage_activities(folder)
    served = [*methods(lineage), *methods(RunControlActivities(temporal))]
    served += methods(SimulatedWork(folder, turns=TURNS, seconds=0.0))
    async with (
        Worker(temporal, task_queue=Queue.CONTROL, workflows=ON_CONTROL, activities=served),
        Worker(temporal, task_queue=Queue.EPISODES, workflows=[SampledGroup, EpisodeWorkflow], activities=served),
        Worker(temporal, task_queue=Queue.TRAINING, activities=served),
        Worker(temporal, task_queue=engine_queue(HOST), activities=served),
    ):
        status = await temporal.execute_workflow(
            "TrainingRun", scale.run_config(episodes), id=run, task_queue=Queue.CONTROL
        )
        histories = await scale._histories(temporal, run)
    assert (status["state"], status["step"]) == (RunState.FINISHED, max(1, episodes // 256))
    with session(open_database(f"sqlite:///{folder / 'ratchet.db'}")) as opened:
        counts = [opened.exec(select(func.count()).select_from(table)).one() for table in (GroupRow, Episode, Turn)]
        members = opened.exec(select(func.count()).select_from(BatchMember)).one()
        played = opened.exec(select(func.count()).where(col(Episode.why).contains("check: exit 0"))).one()
    assert counts == [episodes // 8, episodes, episodes * TURNS]
    assert (members, played) == (episodes, episodes // every)
    assert histories["episode_events"] > 12 * TURNS
