"""`ratchet export`: a run's rows as Parquet and its curves for TensorBoard, whole or not at all."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from sqlalchemy import Engine
from sqlmodel import select

from storage import export
from storage.database import session
from storage.tables import Batch, Episode, Turn
from tests.lineage.commands import ratchet
from tests.storage.conftest import MakeRun
from tests.storage.troubles import quarantined_task


def read(folder: Path, table: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(folder / f"{table}.parquet").to_pylist()
    return rows


def test_every_table_of_a_run_is_a_file_with_that_runs_rows_alone(
    home: Path, make_run: MakeRun, database: Engine, tmp_path: Path
) -> None:
    make_run(steps=2)
    make_run(run="other", steps=1)
    with session(database) as opened:
        quarantined_task(opened)
        episodes = set(opened.exec(select(Episode.id).where(Episode.run == "shell-demo")).all())
        turns = opened.exec(select(Turn).where(Turn.episode == "shell-demo/g0/e0/a0")).all()
    to = tmp_path / "deep" / "out"
    out = ratchet("export", "shell-demo", "--to", str(to)).stdout
    assert {path.stem for path in to.glob("*.parquet")} == {table.name for table in export.tables()}
    assert {row["id"] for row in read(to, "episode")} == episodes
    assert {row["episode"] for row in read(to, "turn")} == episodes
    assert [row for row in read(to, "turn") if row["episode"] == "shell-demo/g0/e0/a0"] == [
        turn.model_dump() for turn in turns
    ]
    assert {row["run"] for table in ("batch", "group", "publication", "engineload") for row in read(to, table)} == {
        "shell-demo"
    }
    assert [row["id"] for row in read(to, "run")] == ["shell-demo"]
    assert {row["id"] for row in read(to, "task")} == {"shell/count-1", "shell/find-1", "shell/sort-1", "shell/edit-1"}
    assert len(read(to, "batchmember")) == 128 and len(read(to, "quarantine")) == 1
    told = json.loads((to / "export.json").read_text())
    assert told["run"] == "shell-demo" and told["rows"]["episode"] == len(episodes)
    assert f"{to}/episode.parquet  {len(episodes)}" in out


def not_a_number(database: Engine) -> float | None:
    """PostgreSQL takes none into its JSON: nothing is there, then."""
    return math.nan if database.dialect.name == "sqlite" else None


def test_json_columns_are_json_and_hold_nothing_that_json_has_not(
    home: Path, make_run: MakeRun, database: Engine, tmp_path: Path
) -> None:
    make_run(steps=1)
    with session(database) as opened:
        batch = opened.get_one(Batch, "shell-demo/b1")
        batch.metrics = {"loss": not_a_number(database), "grad_norm": 1.5}
        opened.add(batch)
    ratchet("export", "shell-demo", "--to", str(tmp_path / "out"))
    (row,) = read(tmp_path / "out", "batch")
    assert json.loads(row["metrics"]) == {"loss": None, "grad_norm": 1.5}
    (run,) = read(tmp_path / "out", "run")
    assert json.loads(run["config"])["rollout"] == {"max_off_policy_steps": 1}


def test_a_table_without_rows_has_the_schema_of_one_with_rows(home: Path, make_run: MakeRun, tmp_path: Path) -> None:
    make_run(run="empty", steps=0, evaluations=False)
    make_run(run="full", steps=1)
    for run in ("empty", "full"):
        ratchet("export", run, "--to", str(tmp_path / run))
    assert read(tmp_path / "empty", "episode") == [] and read(tmp_path / "full", "episode")
    for table in export.tables():
        empty, full = (
            pyarrow.parquet.read_schema(tmp_path / run / f"{table.name}.parquet") for run in ("empty", "full")
        )
        assert empty.equals(full, check_metadata=True) and empty.equals(export.schema_of(table), check_metadata=True)
    schema = pyarrow.parquet.read_schema(tmp_path / "empty" / "episode.parquet")
    assert schema.field("reward").type == pyarrow.float64() and schema.field("reward").nullable
    assert schema.field("tampered").type == pyarrow.bool_() and not schema.field("run").nullable
    assert schema.field("evidence").metadata == {b"type": b"json"}


def test_a_folder_that_is_not_empty_is_refused_unless_forced_and_keeps_what_is_not_ours(
    home: Path, make_run: MakeRun, tmp_path: Path
) -> None:
    make_run(steps=1)
    to = tmp_path / "out"
    to.mkdir()
    ratchet("export", "shell-demo", "--to", str(to), "--tensorboard")
    (to / "mine.txt").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in to.rglob("*")}
    assert "is not empty; with --force" in ratchet("export", "shell-demo", "--to", str(to), code=1).stderr
    assert {path: path.stat().st_mtime_ns for path in to.rglob("*")} == before
    ratchet("export", "shell-demo", "--to", str(to), "--force")
    assert (to / "mine.txt").read_text() == "mine" and not (to / "tensorboard").exists()
    assert (to / "export.json").stat().st_mtime_ns > before[to / "export.json"]


@pytest.mark.parametrize("exists", [True, False])
def test_an_export_that_fails_half_way_leaves_nothing(
    home: Path, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    make_run(steps=1)
    to = tmp_path / "place" / "out"
    if exists:
        to.mkdir(parents=True)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pyarrow.parquet.ParquetWriter, "write_table", full)
    result = ratchet("export", "shell-demo", "--to", str(to), code=1)
    assert "can't be written" in result.stderr and "No space left" in result.stderr and result.stdout == ""
    assert list(to.parent.rglob("*")) == ([to] if exists else [])


def test_a_file_in_the_place_of_the_folder_and_a_run_that_is_not_there_are_said(
    home: Path, make_run: MakeRun, tmp_path: Path
) -> None:
    make_run(steps=0)
    file = tmp_path / "file"
    file.write_text("")
    assert "is not a folder" in ratchet("export", "shell-demo", "--to", str(file), code=1).stderr
    assert "no run 'x'" in ratchet("export", "x", "--to", str(tmp_path / "out"), code=1).stderr
    assert not (tmp_path / "out").exists()


def test_every_table_has_a_way_to_tell_whose_rows_are_whose() -> None:
    for table in export.tables():
        assert export.rows_of(table, "r") is not None and len(export.schema_of(table)) == len(table.columns)


def events(folder: Path) -> Iterator[Any]:
    """What TensorBoard reads: records of a length, its checksum, the bytes and theirs."""
    from tensorboardX.proto.event_pb2 import Event

    (file,) = folder.iterdir()
    data, at = file.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield Event.FromString(data[at + 12 : at + 12 + length])
        at += 16 + length


def test_the_metrics_of_every_step_are_there_for_tensorboard(
    home: Path, make_run: MakeRun, database: Engine, tmp_path: Path
) -> None:
    make_run(steps=9)
    with session(database) as opened:
        batch = opened.get_one(Batch, "shell-demo/b2")
        batch.metrics = batch.metrics | {"loss": not_a_number(database)}
        opened.add(batch)
    out = ratchet("export", "shell-demo", "--to", str(tmp_path / "out"), "--tensorboard").stdout
    assert out.splitlines()[-1] == f"tensorboard --logdir {tmp_path / 'out' / 'tensorboard'}"
    points = {
        (value.tag, event.step): (value.simple_value, event.wall_time)
        for event in events(tmp_path / "out" / "tensorboard")
        for value in event.summary.value
    }
    counts = Counter(tag for tag, _ in points)
    assert counts["time/to_trainable_batch"] == counts["mismatch_kl/mean"] == counts["reward/batch"] == 9
    assert counts["loss"] == 8 and counts["evaluation/mean_reward"] == 3 and counts["weight_sync/pause_s"] == 10
    assert counts["evaluation/by_kind/count"] == 3
    # As in the report: from the update to the proof of the slowest engine.
    assert points["weight_sync/publish_latency_s", 1][0] == pytest.approx(0.51 + 0.3)
    with session(database) as opened:
        batch = opened.get_one(Batch, "shell-demo/b3")
    value, at = points["off_policy/divergence", 3]
    assert value == pytest.approx(batch.metrics["off_policy/divergence"]) and at == batch.trained_at
