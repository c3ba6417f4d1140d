"""A publisher that dies after each of its parts, and what the next try makes of it: on its machine and on another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlmodel import select

from activities.publication import activities as publication_activities
from activities.publication.activities import PublicationActivities
from activities.publication.manifest import Manifest, read_manifest, weights_key
from activities.publication.sending import Sending
from storage.database import session
from storage.objects import MissingObject, ObjectStore
from storage.tables import PolicyVersion, Publication
from tests.publication.stub import Host, Policy, Published

Runs = Callable[..., Published]

PARTS = {
    "before the export": (publication_activities, "export_folder", False),
    "after the export": (publication_activities, "export_folder", True),
    "after the delta": (Sending, "compacted", True),
    "in the upload": (ObjectStore, "put_file", True),
    "after the upload": (Sending, "send", True),
    "before the manifest": (publication_activities, "write_manifest", False),
    "after the manifest": (publication_activities, "write_manifest", True),
    "after the rows": (PublicationActivities, "_record", True),
    "in the retention": (publication_activities, "remove_old", False),
}


def dies(patched: pytest.MonkeyPatch, part: str) -> None:
    """The publisher dies as it calls a part, or as that is done."""
    owner, name, done = PARTS[part]
    real = getattr(owner, name)

    def die(*arguments: Any, **how: Any) -> None:
        if done:
            real(*arguments, **how)
        raise RuntimeError("killed")

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
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="killed"):
        dies(patched, part)
        await run.again(2)
    seen = manifest_there(run)
    if elsewhere:
        run.moved()
    output = await run.again(2)
    manifest = read_manifest(run.store, output.manifest)
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


def manifest_there(run: Published) -> Manifest | None:
    try:
        return read_manifest(run.store, weights_key(run.run, 2))
    except MissingObject:
        return None


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
