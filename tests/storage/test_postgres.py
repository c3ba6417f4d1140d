"""The same lineage on a real PostgreSQL server, where the machine has one installed."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlmodel import select

from storage import evaluations, queries, series
from storage.audit import audit
from storage.database import open_database, session
from storage.export import export_run
from storage.migrations import migrate
from storage.quarantine import find_task, put_mark, undo_mark
from storage.reading import open_to_read
from storage.report import build_report
from storage.report.limits import default_limits
from storage.tables import BatchMember, Episode, Run, ServedEvaluation, Turn
from tests.postgres import missing, postgres_server
from tests.storage import rows, troubles, wrong_rewards
from tests.storage.made_run import MadeRun
from workflows.contracts import BatchWait, EvaluationState
from workflows.errors import StorageError

ROOT = Path(__file__).parents[2]
THREADS = 8


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of a fresh server; its schema is not there yet."""
    if why := missing():
        pytest.skip(why)
    with postgres_server() as server:
        yield server.url()


@pytest.fixture(scope="module")
def postgres(url: str) -> Iterator[Engine]:
    """The schema, made by two processes side by side."""
    code = f"from storage.migrations import migrate; migrate({url!r})"
    other = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    migrate(url)
    assert other.wait(60) == 0
    engine = open_database(url)
    yield engine
    engine.dispose()


def test_rows_are_written_once_and_reports_are_built(postgres: Engine) -> None:
    with session(postgres) as opened:
        MadeRun(opened, run="made", steps=2).write()
    with session(postgres) as opened:
        report = build_report(opened, "made")
        assert report.evaluation.first is not None and len(report.steps) == 2
        assert len(queries.episodes_behind(opened, run="made", version=2)) == 128
        rows.put_run(opened, "twice")
        for _ in range(2):
            queries.put_episode(opened, record=rows.record("twice/g0/e0/a0", turns=3))
        assert len(opened.exec(select(Turn).where(Turn.episode == "twice/g0/e0/a0")).all()) == 3
        assert len(opened.exec(select(Episode).where(Episode.run == "twice")).all()) == 1


def test_what_reads_sees_one_moment_names_what_was_lost_and_exports_all(
    postgres: Engine, url: str, tmp_path: Path
) -> None:
    with session(postgres) as opened:
        MadeRun(opened, run="shell-demo", steps=15).write()
    with session(postgres) as opened:
        troubles.flaky_task(opened)
        troubles.quarantined_task(opened)
    reader = open_to_read(url)
    with session(reader) as reading:
        answers = {item.topic: item for item in build_report(reading, "shell-demo").readiness}
        with session(postgres) as opened:
            rows.put_run(opened, "later")
        assert reading.get(Run, "later") is None
        counts = export_run(reading, run="shell-demo", to=tmp_path / "out")
    with pytest.raises(StorageError, match="read-only"), session(reader) as reading:
        rows.put_run(reading, "never")
    reader.dispose()
    lost, published = answers["environment reliability"], answers["weight publication"]
    assert lost.verdict == published.verdict == "not ready"
    assert "tasks that flake 1" in lost.why[0] and "tasks in quarantine 1" in lost.why[1]
    assert ["sandbox", "local", "6"] in [row[:3] for detail in lost.details for row in detail.rows]
    assert counts["episode"] == 15 * 64 + 3 * 8 + 2 * 3 + 2 and counts["turn"] == 2 * counts["episode"]


def test_marks_on_rewards_are_kept_out_and_told_and_audits_find_the_same(postgres: Engine) -> None:
    run = "marked"
    with session(postgres) as opened:
        MadeRun(opened, run=run, steps=2).write()
    with session(postgres) as opened:
        target = find_task(opened, task="shell/edit-1", run=run)
        for new in (True, False):
            assert put_mark(opened, run=run, target=target, why="an exploit", by="me")[1] is new
    with session(postgres) as opened:
        rewards = build_report(opened, run).rewards
        assert (rewards.affected.episodes, rewards.affected.token_share) == (32, 0.25)
        assert [batch.step for batch in rewards.affected.batches] == [1, 2] and rewards.findings == []
        assert {item.kind: item.valid for item in series.episodes_by_kind(opened, run=run)}["edit"] == 0
        undo_mark(opened, run=run, target=target, why="it was none", by="me")
    with session(postgres) as opened:
        assert build_report(opened, run).rewards.affected.episodes == 0
        if opened.get(Run, troubles.RUN) is None:
            rows.put_run(opened, troubles.RUN)
        for plant in wrong_rewards.PLANTS:
            nested = opened.begin_nested()
            planted = plant(opened)
            found = audit(opened, run=troubles.RUN, thresholds=default_limits().audit)
            assert planted.suspicion in {item.suspicion for item in found}
            nested.rollback()


def test_evaluations_are_kept_compared_found_stale_and_have_the_engines(postgres: Engine) -> None:
    with session(postgres) as opened:
        made = MadeRun(opened, run="evaluated", steps=2)
        made.write()
        made.measure("evaluated/bf16", 2, 0.25, dtype="bfloat16")
    with session(postgres) as opened:
        first = evaluations.resolve(opened, name="evaluated/eval-v2")
        second = evaluations.resolve(opened, name="evaluated")
        assert second.id == "evaluated/bf16" and evaluations.compare(first, second).interval.tasks == 48
        now = evaluations.serving(opened, run="evaluated")
        assert [change.field for change in evaluations.stale(first, now, second)] == ["dtype"]
        row = first.model_dump() | {"id": "evaluated/night", "workflow": "night", "state": "running", "ended_at": None}
        opened.add(ServedEvaluation.model_validate(row))
        opened.flush()
        assert queries.lease_engines(opened, run="night") == ""
        assert queries.lease_engines(opened, run="evaluated") == "night"
        evaluations.close_evaluation(opened, workflow="night", state=EvaluationState.FAILED, reason="gone")
        assert queries.lease_engines(opened, run="evaluated") == ""
        queries.release_engines(opened, run="evaluated")


def test_of_threads_that_want_the_same_groups_one_gets_them_and_the_others_are_told(postgres: Engine) -> None:
    with session(postgres) as opened:
        rows.put_run(opened, "race")
        group = rows.put_group_with_episodes(opened, run="race")
    refused: list[StorageError] = []
    gate = threading.Barrier(THREADS)

    def reserve(step: int) -> None:
        gate.wait()
        try:
            with session(postgres) as opened:
                queries.reserve_batch(
                    opened,
                    batch_id=f"race/b{step}",
                    run="race",
                    step=step,
                    policy_version=0,
                    groups=[group],
                    wait=BatchWait(seconds=1.0),
                )
        except StorageError as error:
            refused.append(error)

    together([threading.Thread(target=reserve, args=(step + 1,)) for step in range(THREADS)])
    assert [type(error) for error in refused] == [queries.AlreadyReserved] * (THREADS - 1)
    with session(postgres) as opened:
        assert len(opened.exec(select(BatchMember).where(BatchMember.group_id == "race/g0")).all()) == 2


def test_of_runs_that_want_the_engines_at_once_one_gets_them(postgres: Engine) -> None:
    runs = [f"wants-{number}" for number in range(THREADS)]
    with session(postgres) as opened:
        for run in runs:
            rows.put_run(opened, run)
    holders: list[str] = []
    gate = threading.Barrier(THREADS)

    def lease(run: str) -> None:
        gate.wait()
        with session(postgres) as opened:
            holders.append(queries.lease_engines(opened, run=run))

    together([threading.Thread(target=lease, args=(run,)) for run in runs])
    assert holders.count("") == 1 and len(set(holders)) == 2


def together(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
