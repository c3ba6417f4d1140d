"""Which weights and training states stay, and the removal of the rest. Called by `publish` once the newer one is there.

Promises: the newest `keep_last` versions stay with the states that they came from, or from which those can be made
again; so does what an engine serves or may
still be loading; a manifest goes before its objects, and an object only when no manifest that stays refers to it. What
killed tries left behind is swept too: nothing of the run is being written between a publication and the next batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Engine
from sqlmodel import col, func, select

from activities.publication.manifest import objects_prefix, read_manifest, with_bases
from storage.database import session
from storage.objects import ObjectStore
from storage.tables import Batch, EngineLoad, PolicyVersion, Publication

IN_USE_REACH = 8
"""Versions back that an engine may pin: one that lags further is out of routing and will load the newest."""
MANIFEST = "/manifest.json"


@dataclass(frozen=True)
class Removed:
    manifests: int = 0
    objects: int = 0
    bytes: int = 0


def versions_to_keep(published: Iterable[int], in_use: Iterable[int], keep_last: int) -> set[int]:
    """The newest `keep_last`, and from the oldest version in use on all newer ones, at most IN_USE_REACH back."""
    ordered = sorted(published)
    if not ordered:
        return set()
    kept = set(ordered[-keep_last:])
    floor = max(min(in_use, default=ordered[-1]), ordered[-1] - IN_USE_REACH)
    return kept | {version for version in ordered if version >= floor}


def remove_old(store: ObjectStore, database: Engine, *, run: str, keep_last: int) -> Removed:
    """Apply the retention to a run. Does nothing while a later batch is reserved: its update may be writing."""
    # Listed before the check: whatever a later update writes is not in this list.
    objects = dict(store.keys(f"{objects_prefix(run)}/"))
    manifests = {
        key for kind in ("weights", "state") for key, _ in store.keys(f"runs/{run}/{kind}/") if key.endswith(MANIFEST)
    }
    kept = _kept_manifests(database, run, keep_last)
    if kept is None:
        return Removed()
    kept = with_bases(store, kept & manifests)
    gone = sorted(manifests - kept)
    store.delete(gone)
    referred = {file.key for key in sorted(manifests & kept) for file in read_manifest(store, key).files}
    orphans = sorted(objects.keys() - referred)
    store.delete(orphans)
    return Removed(manifests=len(gone), objects=len(orphans), bytes=sum(objects[key] for key in orphans))


def _kept_manifests(database: Engine, run: str, keep_last: int) -> set[str] | None:
    """Keys of the manifests that stay; None while nothing may be removed."""
    with session(database) as opened:
        published = {row.version: row for row in opened.exec(select(Publication).where(Publication.run == run))}
        states = {row.version: row for row in opened.exec(select(PolicyVersion).where(PolicyVersion.run == run))}
        loads = opened.exec(select(EngineLoad).where(EngineLoad.run == run).order_by(col(EngineLoad.loaded_at))).all()
        last_step = opened.exec(select(func.max(Batch.step)).where(Batch.run == run)).one() or 0
    if not published or last_step > states[max(published)].step:
        return None
    serves = {load.engine: load.version for load in loads if load.proven}
    kept = versions_to_keep(published, serves.values(), keep_last)
    return {published[version].manifest for version in kept} | {states[version].checkpoint for version in kept}
