"""A publisher that dies after each of its parts, and what the next try makes of it: on its machine and on another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlmodel import col, select

from activities.publication import activities as publication_activities
from activities.publication.activities import PublicationActivities
from activities.publication.manifest import Manifest, read_manifest, weights_key
from activities.publication.sending import Sending
from storage.database import session
from storage.objects import MissingObject, ObjectStore
from storage.report.weights import weight_troubles
from storage.tables import PolicyVersion, Publication, WeightTry
from tests.conftest import bucket_of, s3_server
from tests.publication.stub import Host, Policy, Published
from workflows.errors import StorageError

Runs = Callable[..., Published]

PARTS = {
    "before the export": (publication_activities, "export_folder", False, "export"),
    "after the export": (publication_activities, "export_folder", True, "export"),
    "after the delta": (Sending, "compacted", True, "delta"),
    "in the upload": (ObjectStore, "put_file", True, "upload"),
    "after the upload": (Sending, "send", True, "upload"),
    "before the manifest": (publication_activities, "write_manifest", False, "manifest"),
    "after the manifest": (publication_activities, "write_manifest", True, "manifest"),
    "after the rows": (PublicationActivities, "_record", True, "rows"),
    "in the retention": (publication_activities, "remove_old", False, "retention"),
}
"""What it calls, whether that is done, and the part of which the report speaks then."""


class Killed(BaseException):
    """Nothing of ours handles it, as nothing handles SIGKILL."""


def dies(patched: pytest.MonkeyPatch, part: str) -> None:
    """The publisher dies as it calls a part, or as that is done."""
    owner, name, done, _ = PARTS[part]
    real = getattr(owner, name)

    def die(*arguments: Any, **how: Any) -> None:
        if done:
            real(*arguments, **how)
        raise Killed

    patched.setattr(owner, name, die)


async def two_versions(run: Published, policy: Policy) -> None:
    for version in (0, 1):
        await run.publish(version, policy.tensors())
        run.loaded(version)
        policy.step()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["on its machine", "on another machine"])
@pytest.mark.parametrize("part", PARTS)
async def test_the_next_try_publishes_the_same_version_and_leaves_nothing_behind(
    published: Runs, monkeypatch: pytest.MonkeyPatch, part: str, elsewhere: bool
) -> None:
    run, policy = published(full_every=5, keep_last=9), Policy(20_000)
    await two_versions(run, policy)
    run.trained(2, policy.tensors())
    with monkeypatch.context() as patched, pytest.raises(Killed):
        dies(patched, part)
        await run.again(2)
    seen, named = manifest_there(run), PARTS[part][-1]
    while tries(run, 2) != [(named, "")]:
        await asyncio.sleep(0.01)
    if elsewhere:
        run.moved()
    output = await run.again(2)
    manifest = read_manifest(run.store, output.manifest)
    assert tries(run, 2) == [(named, "interrupted"), ("retention", "published")]
    with session(run.database) as opened:
        (trouble,) = weight_troubles(opened, run.run, over=False)
    assert (trouble.version, trouble.engine, trouble.settled) == (2, "", True)
    assert trouble.what == f"{named}: its process ended in the middle of it"
    assert trouble.ending.startswith("published with try 2, ")
    assert output == await run.again(2)
    if seen is not None:
        assert manifest.digest == seen.digest == output.digest
    if seen is not None and not elsewhere:
        assert manifest == seen
    await Host(run, "host").load(manifest)
    with session(run.database) as opened:
        assert {row.version for row in opened.exec(select(Publication)).all()} == {0, 1, 2}
        assert len(opened.exec(select(PolicyVersion)).all()) == 3
    assert run.objects().keys() == run.needed()
    assert not run.store.uploads(f"runs/{run.run}/")
    assert files_below(run.spool) <= {f"offers/{manifest.weights_file.sha256}"}
    run.loaded(2)
    policy.step()
    await Host(run, "host").load(await run.publish(3, policy.tensors()))


async def test_a_store_that_is_down_is_named_with_the_part_that_met_it(
    published: Runs, database: Engine, tmp_path: Path
) -> None:
    run = published()
    (tmp_path / "s3").mkdir()
    with s3_server(tmp_path / "s3") as (access, server):
        run.store = bucket_of(access)
        run.moved()
        run.trained(0, Policy(1000).tensors())
        server.kill()
        server.wait(10)
        with pytest.raises(StorageError) as caught:
            await run.again(0)
    with session(database) as opened:
        (trouble,) = weight_troubles(opened, run.run, over=False)
        (dead,) = weight_troubles(opened, run.run, over=True)
    assert trouble.what == f"upload: {caught.value}"
    assert (trouble.ending, dead.ending, dead.settled) == ("not published yet", "never published", False)


def tries(run: Published, version: int) -> list[tuple[str, str]]:
    """(part, how it ended) of each try to publish a version."""
    with session(run.database) as opened:
        rows = opened.exec(
            select(WeightTry)
            .where(WeightTry.run == run.run, WeightTry.version == version)
            .order_by(col(WeightTry.began_at))
        ).all()
    return [(row.part, row.ended) for row in rows]


def manifest_there(run: Published) -> Manifest | None:
    try:
        return read_manifest(run.store, weights_key(run.run, 2))
    except MissingObject:
        return None


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
