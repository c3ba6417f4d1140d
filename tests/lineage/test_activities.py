from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlmodel import select

from activities.lineage.activities import LineageActivities
from storage import queries
from storage.database import session
from storage.objects import ObjectStore
from storage.tables import Batch, EngineLease, Episode, Group, Quarantine, Run, Task, Turn
from tasksets import open_taskset
from tests.storage import rows
from workflows.contracts import (
    CloseRunInput,
    EngineInfo,
    LeaseEnginesInput,
    OpenRunInput,
    OpenRunOutput,
    PickTasksInput,
    PooledGroup,
    QuarantineInput,
    ReserveBatchInput,
    RunProgress,
    RunState,
    Split,
)
from workflows.errors import InvalidConfig

ENGINE = EngineInfo(name="local-e0", host="local", url="http://127.0.0.1:1")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with one model, as far as the opening of a run looks at it."""
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 1024}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").touch()
    return folder.parent


@pytest.fixture
def lineage(database: Engine, object_store: ObjectStore, models: Path) -> LineageActivities:
    return LineageActivities(
        database, object_store, engines=[ENGINE], models_dir=models, open_taskset=open_taskset, now=lambda: 50.0
    )


def opening(run: str = "r", execution: str = "first", **config: object) -> OpenRunInput:
    return OpenRunInput(run=run, config={"model": "tiny", "seed": 3, **config}, execution=execution)


async def opened(lineage: LineageActivities, run: str = "r", **config: object) -> OpenRunOutput:
    return await lineage.open_run(opening(run, execution=f"first-{run}", **config))


async def test_an_opened_run_has_a_row_and_learns_what_the_workflow_cannot_see(
    lineage: LineageActivities, database: Engine, models: Path
) -> None:
    out = await opened(lineage)
    assert out.model == str(models / "tiny")
    assert out.engines == [ENGINE] and out.resume_checkpoint == ""
    assert out.train_tasks > 0 and out.held_out_tasks >= 48
    with session(database) as found:
        row = found.get(Run, "r")
        assert row is not None
        assert (row.state, row.mode, row.seed, row.started_at) == ("starting", "async", 3, 50.0)
        assert row.config["model"] == "tiny"


async def test_every_mistake_of_an_opening_is_named_in_one_final_error(
    lineage: LineageActivities, database: Engine, object_store: ObjectStore, models: Path
) -> None:
    without_engines = LineageActivities(
        database, object_store, engines=[], models_dir=models, open_taskset=open_taskset
    )
    await opened(lineage, "r")
    message = opening("r", "second", model="nowhere", taskset="nothing", resume_from="missing", evaluation={"tasks": 9})
    with pytest.raises(InvalidConfig) as caught:
        await without_engines.open_run(message)
    assert not caught.value.retryable
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "model",
        "taskset",
        "evaluation.tasks",
        "resume_from",
        "engines",
        "workflow id",
    ] or [line.partition(":")[0] for line in lines] == ["model", "taskset", "resume_from", "engines", "workflow id"]
    text = "\n".join(lines)
    assert "ratchet bootstrap tiny" in text and "made here so far: tiny" in text
    assert "shell" in text and "no run 'missing'; the latest are: r" in text and '"resume_from": "r"' in text


async def test_a_model_that_lacks_parts_or_positions_is_refused_by_name(
    lineage: LineageActivities, models: Path
) -> None:
    (models / "tiny" / "tokenizer.json").unlink()
    (models / "tiny" / "model.safetensors").unlink()
    with pytest.raises(InvalidConfig) as caught:
        await opened(lineage, rollout={"context_length": 4096})
    text = str(caught.value)
    assert "has no tokenizer" in text and "has no safetensors weights" in text
    assert "rollout.context_length: 4096 is above the model's 1024 positions" in text


async def test_more_held_out_tasks_than_there_are_are_refused(lineage: LineageActivities) -> None:
    with pytest.raises(InvalidConfig, match=r"evaluation.tasks: 1000, but the taskset has \d+ held-out tasks"):
        await opened(lineage, evaluation={"tasks": 1000})


async def test_a_retry_of_the_opening_passes_and_a_second_run_under_the_id_is_refused(
    lineage: LineageActivities, database: Engine
) -> None:
    first = await lineage.open_run(opening(execution="first"))
    await lineage.record_progress(RunProgress(run="r", state=RunState.RUNNING, step=2, policy_version=2))
    assert await lineage.open_run(opening(execution="first")) == first
    with pytest.raises(InvalidConfig, match="run 'r' exists"):
        await lineage.open_run(opening(execution="second"))
    with session(database) as found:
        row = found.get(Run, "r")
        assert row is not None and (row.step, row.execution) == (2, "first")


async def test_a_run_resumes_from_the_newest_checkpoint_of_another(
    lineage: LineageActivities, database: Engine
) -> None:
    await opened(lineage, "old")
    with pytest.raises(InvalidConfig, match=r"resume_from: run 'old' is not over .*: wait for its end, or cancel it"):
        await opened(lineage, "new", resume_from="old")
    await lineage.close_run(CloseRunInput(run="old", state=RunState.CANCELLED))
    with pytest.raises(InvalidConfig, match="resume_from: run 'old' has no checkpoint"):
        await opened(lineage, "new", resume_from="old")
    with session(database) as found:
        for step in (1, 2, 3):
            key = f"runs/old/checkpoints/{step}" if step < 3 else ""
            found.add(Batch(id=f"old/b{step}", run="old", step=step, policy_version=0, checkpoint=key, reserved_at=1.0))
    assert (await opened(lineage, "new", resume_from="old")).resume_checkpoint == "runs/old/checkpoints/2"


async def test_picked_tasks_are_those_of_the_order_and_get_their_rows_once(
    lineage: LineageActivities, database: Engine
) -> None:
    message = PickTasksInput(taskset="shell", split=Split.TRAIN, seed=0, cursor=5, count=4)
    first = await lineage.pick_tasks(message)
    assert await lineage.pick_tasks(message) == first
    with session(database) as found:
        stored = found.exec(select(Task)).all()
        assert {row.id for row in stored} == {f"shell/{task.task_id}" for task in first.tasks}
        assert all(row.kind and row.instruction and row.split == "train" for row in stored)


async def test_what_workflows_report_is_stored_once_however_often_they_report_it(
    lineage: LineageActivities, database: Engine
) -> None:
    await opened(lineage)
    closed = rows.group()
    pooled = PooledGroup(closed.number, 0, 0.0, 0.0, False)
    for _ in range(2):
        for attempt, reward in zip(closed.members, closed.rewards, strict=True):
            await lineage.record_episode(rows.record(attempt, reward=reward))
        await lineage.record_group(closed)
        reserved = await lineage.reserve_batch(
            ReserveBatchInput(run="r", step=1, policy_version=0, groups=[pooled], opened_at=1.0, complete_at=4.0)
        )
        assert (reserved.batch_id, reserved.episodes) == ("r/b1", 2)
        assert reserved.reward == sum(closed.rewards) / 2
        assert reserved.wait is not None and reserved.wait.seconds == sum(reserved.wait.parts.values()) == 3.0
        assert (reserved.wait.tail_group, reserved.wait.tail_attempt) == ("r/g0", "r/g0/e1/a0")
    with session(database) as found:
        counts = [len(found.exec(select(table)).all()) for table in (Episode, Turn, Group, Batch)]
        assert counts == [2, 4, 1, 1]


async def test_a_reservation_tells_the_rows_of_what_was_dropped_and_the_runs_end_settles_the_finish_order(
    lineage: LineageActivities, database: Engine
) -> None:
    await opened(lineage)
    for number in range(3):
        closed = rows.group(number)
        for attempt, reward in zip(closed.members, closed.rewards, strict=True):
            await lineage.record_episode(rows.record(attempt, reward=reward))
        await lineage.record_group(closed)
    taken = [PooledGroup(number, 0, 0.0, 0.0, False) for number in (0, 2)]
    message = ReserveBatchInput(run="r", step=1, policy_version=0, groups=taken, dropped={"surplus": [1]})
    for _ in range(2):
        assert (await lineage.reserve_batch(message)).episodes == 4
    with session(database) as found:
        group, batch = found.get(Group, "r/g1"), found.get(Batch, "r/b1")
        assert group is not None and (group.eligible, group.reason) == (False, "surplus")
        assert batch is not None and not batch.metrics
        batch.state, batch.trained_at = "published", 9.0
        found.add(batch)
    await lineage.close_run(CloseRunInput(run="r", state=RunState.FINISHED))
    with session(database) as found:
        batch = found.get(Batch, "r/b1")
        assert batch is not None and batch.metrics["finish_order/open"] == 0.0


async def test_a_task_in_quarantine_has_one_row_however_often_it_is_reported(
    lineage: LineageActivities, database: Engine
) -> None:
    await opened(lineage)
    message = QuarantineInput(run="r", task=rows.TASK, why="3 short groups in a row, the last r/g7", since=9.0)
    for _ in range(2):
        await lineage.record_quarantine(message)
    with session(database) as found:
        (row,) = found.exec(select(Quarantine)).all()
        assert (row.run, row.task, row.why, row.since) == ("r", "shell/count-17", message.why, 9.0)


async def test_why_a_run_is_degraded_reaches_its_row_and_goes_when_it_resumes(
    lineage: LineageActivities, database: Engine
) -> None:
    await opened(lineage)
    why = "the last 4 groups closed without a valid sibling"
    told = RunProgress(run="r", state=RunState.DEGRADED, step=2, policy_version=2, reason=why)
    for message in (told, told.model_copy(update={"state": RunState.RUNNING, "reason": ""})):
        await lineage.record_progress(message)
        with session(database) as found:
            row = found.get(Run, "r")
            assert row is not None and (row.state, row.reason) == (message.state, message.reason)


async def test_the_lease_of_a_closed_run_is_free_and_its_end_is_written_once(
    lineage: LineageActivities, database: Engine
) -> None:
    await opened(lineage, "a")
    await opened(lineage, "b")
    assert (await lineage.lease_engines(LeaseEnginesInput(run="a"))).held_by == ""
    assert (await lineage.lease_engines(LeaseEnginesInput(run="b"))).held_by == "a"
    await lineage.close_run(CloseRunInput(run="a", state=RunState.FAILED, reason="the loss is nan"))
    await lineage.close_run(CloseRunInput(run="a", state=RunState.CANCELLED))
    assert (await lineage.lease_engines(LeaseEnginesInput(run="b"))).held_by == ""
    with session(database) as found:
        row, lease = found.get(Run, "a"), found.get(EngineLease, queries.ENGINES)
        assert row is not None and (row.state, row.reason, row.ended_at) == ("failed", "the loss is nan", 50.0)
        assert lease is not None and lease.run == "b"


async def test_a_run_that_never_opened_can_be_closed(lineage: LineageActivities, database: Engine) -> None:
    await lineage.close_run(CloseRunInput(run="never", state=RunState.FAILED))
    with session(database) as found:
        assert found.get(Run, "never") is None
