"""Rows, uploads and objects of dead runs, on a real S3 server and a real database."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Engine

from activities.janitor import records
from activities.janitor.records import RecordJanitorActivities
from activities.lineage.activities import LineageActivities
from activities.publication.manifest import Delta, Manifest, weights_key, write_manifest
from storage.database import session
from storage.objects import ObjectStore
from storage.tables import EngineLease, Run
from tasksets import open_taskset
from tests.janitor.worlds import MadeRun, a_moment
from workflows.contracts import JanitorInput, LeaseEnginesInput, RunState, Swept

GRACE_S = 3600.0
LIMITS = JanitorInput(object_grace_s=GRACE_S)


class Asked:
    """What Temporal would say: the runs whose workflow runs, and those of which a group still does."""

    def __init__(self) -> None:
        self.living: set[str] = set()
        self.with_groups: set[str] = set()

    async def namespace(self) -> str:
        return "default/1"

    async def lives(self, run: str) -> bool:
        return run in self.living

    async def is_over(self, run: str) -> bool:
        return run not in self.living | self.with_groups


@pytest.fixture
def asked() -> Asked:
    return Asked()


class Janitor:
    """Its activities; `before` is the moment whose grace has just ended."""

    def __init__(self, lineage: LineageActivities, asked: Asked, database: Engine, store: ObjectStore) -> None:
        self.before = a_moment()
        self.activities = RecordJanitorActivities(
            lineage,
            asked,  # type: ignore[arg-type]
            database,
            store,
            now=lambda: self.before + GRACE_S,
        )

    async def sweep(self) -> Swept:
        return await self.activities.sweep_store(LIMITS)


@pytest.fixture
def lineage(database: Engine, object_store: ObjectStore, tmp_path: Path, asked: Asked) -> LineageActivities:
    return LineageActivities(
        database, object_store, engines=[], models_dir=tmp_path, open_taskset=open_taskset, lives=asked.lives
    )


@pytest.fixture
def janitor(lineage: LineageActivities, asked: Asked, database: Engine, object_store: ObjectStore) -> Janitor:
    return Janitor(lineage, asked, database, object_store)


async def test_a_run_whose_workflow_is_gone_is_closed_with_its_reason_and_frees_the_engines(
    lineage: LineageActivities, janitor: Janitor, database: Engine, object_store: ObjectStore, asked: Asked
) -> None:
    for run in ("dead", "alive"):
        MadeRun(run, object_store, database, RunState.RUNNING, None)
    MadeRun("done", object_store, database, RunState.FINISHED)
    asked.living.add("alive")
    await lineage.lease_engines(LeaseEnginesInput(run="dead"))
    report = await janitor.activities.close_gone_runs(LIMITS)
    assert report.removed == {"runs_closed": 1}
    with session(database) as opened:
        rows = {name: opened.get(Run, name) for name in ("dead", "alive", "done")}
        assert opened.get(EngineLease, "engines") is None
    assert {name: row.state for name, row in rows.items() if row} == {
        "dead": "failed",
        "alive": "running",
        "done": "finished",
    }
    assert rows["dead"] and "terminated" in rows["dead"].reason and rows["dead"].ended_at


async def test_of_a_run_that_is_over_stays_what_lineage_refers_to_and_the_rest_goes(
    janitor: Janitor, database: Engine, object_store: ObjectStore
) -> None:
    run = MadeRun("r", object_store, database)
    for version in range(6):
        run.publish(version)
    run.evaluated(0)
    run.loaded(3, "local-e0", at=1.0)
    run.loaded(1, "local-e0", at=2.0)
    run.loaded(2, "local-e0", at=3.0, proven=False)
    run.trained(6, run.write("runs/r/state/s000006/f0002/manifest.json", "state 6"))
    run.write("runs/r/state/s000006/f0001/manifest.json", "state 6 of an outdated try")
    run.put("a file of an upload that died before its manifest")
    object_store.put("runs/r/segments/r/g0/e0/a0/t0", b"tokens")
    janitor.before = a_moment()
    run.put("a file of a moment ago")

    report = await janitor.sweep()
    stays = {f"weights/v{version:06d}" for version in (0, 1, 2, 5)}
    stays |= {f"state/s{step:06d}/f0002" for step in (0, 1, 2, 5, 6)}
    stays |= {f"weights {version}" for version in (0, 1, 2, 5)} | {f"state {step}" for step in (0, 1, 2, 5, 6)}
    stays |= {"shared", "a file of a moment ago", "segments/r/g0/e0/a0/t0"}
    assert run.left == stays
    assert report.removed == {"manifests": 5, "objects": 6} and report.bytes > 0 and not report.errors
    assert (await janitor.sweep()).removed == {}, "a second pass finds nothing"


async def test_what_a_kept_version_is_made_from_stays_whatever_became_of_the_versions_before(
    janitor: Janitor, database: Engine, object_store: ObjectStore
) -> None:
    run = MadeRun("r", object_store, database)
    run.publish(0)
    run.publish(1)
    base, change = run.put("weights 0"), run.put("what changed")
    delta = Delta(
        key=change.key, bytes=change.bytes, sha256=change.sha256, base_sha256=base.sha256, base_digest="of version 0"
    )
    made = run.put("weights 1").model_copy(update={"key": base.key, "bytes": base.bytes, "deltas": [delta]})
    key = weights_key("r", 1)
    write_manifest(object_store, key, Manifest(kind="weights", run="r", version=1, step=1, files=[made]))
    janitor.before = a_moment()
    await janitor.sweep()
    assert {"weights/v000001", "weights 0", "what changed"} <= run.left
    assert not {"weights/v000000", "weights 1", "shared"} & run.left


async def test_an_engine_that_has_gone_on_to_another_run_holds_nothing_back(
    janitor: Janitor, database: Engine, object_store: ObjectStore
) -> None:
    first, second = (MadeRun(name, object_store, database) for name in ("a", "b"))
    for version in range(2):
        first.publish(version)
    second.publish(0)
    first.loaded(0, "local-e0", at=1.0)
    second.loaded(0, "local-e0", at=2.0)
    janitor.before = a_moment()
    await janitor.sweep()
    assert "weights/v000000" not in first.left and "weights/v000001" in first.left
    assert "weights/v000000" in second.left


@pytest.mark.parametrize("lives", ["the run", "a group", "the row", "another lineage"])
async def test_nothing_goes_of_a_run_that_lives_in_any_way(
    janitor: Janitor, database: Engine, object_store: ObjectStore, asked: Asked, lives: str
) -> None:
    run = MadeRun("r", object_store, database, RunState.RUNNING if lives == "the row" else RunState.FAILED)
    if lives == "the run":
        asked.living.add("r")
    if lives == "a group":
        asked.with_groups.add("r")
    run.put("half an upload")
    object_store.put("runs/elsewhere/objects/0", b"of another lineage")
    begin_upload(object_store, "r" if lives != "another lineage" else "elsewhere")
    janitor.before = a_moment()
    report = await janitor.sweep()
    assert report.removed == ({"objects": 1} if lives == "another lineage" else {})
    assert object_store.exists("runs/elsewhere/objects/0") and len(object_store.uploads("runs/")) == 1


async def test_a_run_that_ended_within_the_grace_is_left_alone(
    janitor: Janitor, database: Engine, object_store: ObjectStore
) -> None:
    run = MadeRun("r", object_store, database, ended_at=janitor.before + 60)
    run.put("half an upload")
    begin_upload(object_store, "r")
    janitor.before = a_moment()
    assert (await janitor.sweep()).removed == {}


async def test_stale_uploads_of_runs_that_are_over_are_aborted(
    janitor: Janitor, database: Engine, object_store: ObjectStore
) -> None:
    MadeRun("team/r", object_store, database)
    begin_upload(object_store, "team/r")
    janitor.before = a_moment()
    begin_upload(object_store, "team/r", name="young")
    assert (await janitor.sweep()).removed == {"uploads": 1}
    assert [upload.key for upload in object_store.uploads("runs/")] == ["runs/team/r/objects/young"]


async def test_a_manifest_that_cannot_be_read_keeps_its_runs_objects_and_no_others(
    janitor: Janitor, database: Engine, object_store: ObjectStore
) -> None:
    broken, whole = (MadeRun(name, object_store, database) for name in ("broken", "whole"))
    broken.publish(0)
    object_store.put("runs/broken/weights/v000000/manifest.json", b"{")
    for run in (broken, whole):
        run.put("half an upload")
    janitor.before = a_moment()
    report = await janitor.sweep()
    assert "half an upload" in broken.left and "half an upload" not in whole.left
    assert len(report.errors) == 1 and "objects of broken" in report.errors[0]


async def test_many_dead_runs_are_swept_in_turns(
    janitor: Janitor, database: Engine, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "NEWEST", 1)
    monkeypatch.setattr(records, "OTHERS", 2)
    made = [MadeRun(f"r{number}", object_store, database, ended_at=float(number)) for number in range(6)]
    for run in made:
        run.put("half an upload")
    janitor.before = a_moment()
    assert (await janitor.sweep()).removed == {"objects": 3}
    for _ in range(2):
        janitor.before += records.PASS_S
        await janitor.sweep()
    assert [run.left for run in made] == [set()] * 6


def begin_upload(store: ObjectStore, run: str, *, name: str = "half") -> None:
    """A multipart upload whose writer died after its first part."""
    key = f"runs/{run}/objects/{name}"
    upload = store._client.create_multipart_upload(Bucket=store.bucket, Key=key)
    store._client.upload_part(Bucket=store.bucket, Key=key, UploadId=upload["UploadId"], PartNumber=1, Body=b"x" * 99)
