"""Which weights and training states stay, and the removal of the rest. Called by `publish` once the newer one is there.

Promises: the newest `keep_last` versions stay with the states that they came from, or from which those can be made
again; weights stay that an engine serves or may still be loading, every `keep_every`-th version's, the last that the
object store has at all, and whatever was published since the last version that an engine has proven, with that one. A
manifest goes before its objects, and an object only when no manifest that stays needs it, be it as a base. What killed
tries left behind is swept too: nothing of the run is being written between a publication and the next batch.

An open episode and an evaluation refer to versions through the engines that play them, so that nothing else is asked.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import Engine
from sqlmodel import col, func, select

from activities.publication.manifest import objects_prefix, read_manifest, with_bases
from storage.database import session
from storage.objects import MissingObject, ObjectStore
from storage.tables import Batch, EngineLoad, PolicyVersion, Publication
from workflows.config import RunConfig
from workflows.errors import StorageError

log = logging.getLogger(__name__)

IN_USE_REACH = 8
"""Versions back that an engine may be loading: one that lags further is out of routing and will load the newest."""
MANIFEST = "/manifest.json"


@dataclass(frozen=True)
class Removed:
    manifests: int = 0
    objects: int = 0
    bytes: int = 0
    uploads: int = 0
    """Unfinished ones, which were aborted."""


@dataclass(frozen=True)
class _Kept:
    manifests: set[str]
    published_at: float
    """Of the newest version."""


def versions_to_keep(
    published: Iterable[int], *, serves: Collection[int], loaded: Iterable[int], keep_last: int, keep_every: int = 0
) -> set[int]:
    """`serves`: each engine's last proven version, `loaded`: the last that it loaded, proven or not.

    An engine may be loading any version from its last one on, at most IN_USE_REACH back; an engine of which nothing is
    known, any since the last that another has proven."""
    ordered = sorted(published)
    if not ordered:
        return set()
    reach = ordered[-1] - IN_USE_REACH
    proven = [version for version in ordered if serves and version <= max(serves)][-1:]
    floor = max(min([*loaded, *proven], default=reach), reach)
    kept = {*ordered[-keep_last:], *proven, *serves} | {version for version in ordered if version >= floor}
    if keep_every:
        kept |= {version for version in ordered if version % keep_every == 0}
    return kept & set(ordered)


def remove_old(store: ObjectStore, database: Engine, *, run: str, config: RunConfig) -> Removed:
    """Apply the retention to a run. Does nothing while a later batch is reserved: its update may be writing."""
    # Listed before the check: whatever a later update writes is not in this list.
    objects = dict(store.keys(f"{objects_prefix(run)}/"))
    manifests = {
        key for kind in ("weights", "state") for key, _ in store.keys(f"runs/{run}/{kind}/") if key.endswith(MANIFEST)
    }
    kept = _kept(database, run, config)
    if kept is None:
        return Removed()
    try:
        stays = with_bases(store, kept.manifests & manifests)
        needed = {key for name in sorted(manifests & stays) for key in read_manifest(store, name).objects}
    except StorageError as error:
        if error.retryable:
            raise
        log.warning("nothing of %s is removed while one of its manifests can't be read: %s", run, error)
        return Removed()
    gone = sorted(manifests - stays)
    store.delete(gone)
    orphans = sorted(objects.keys() - needed)
    store.delete(orphans)
    return Removed(
        manifests=len(gone),
        objects=len(orphans),
        bytes=sum(objects[key] for key in orphans),
        uploads=_abort_uploads(store, run, before=kept.published_at),
    )


def _abort_uploads(store: ObjectStore, run: str, *, before: float) -> int:
    """What killed tries began to upload and nobody will end; `close_run` and the janitor look after runs that are
    over."""
    left = [upload for upload in store.uploads(f"{objects_prefix(run)}/") if upload.started < before]
    for upload in left:
        with suppress(MissingObject):
            store.abort_upload(upload)
    return len(left)


def _kept(database: Engine, run: str, config: RunConfig) -> _Kept | None:
    """Keys of the manifests that stay; None while nothing may be removed."""
    with session(database) as opened:
        published = {row.version: row for row in opened.exec(select(Publication).where(Publication.run == run))}
        states = {row.version: row for row in opened.exec(select(PolicyVersion).where(PolicyVersion.run == run))}
        loads = opened.exec(select(EngineLoad).where(EngineLoad.run == run).order_by(col(EngineLoad.loaded_at))).all()
        last_step = opened.exec(select(func.max(Batch.step)).where(Batch.run == run)).one() or 0
    if not published or last_step > states[max(published)].step:
        return None
    rules = config.publication
    stored = [version for version in published if rules.stores(version, config.weight_channel)]
    versions = versions_to_keep(
        published,
        serves={load.engine: load.version for load in loads if load.proven}.values(),
        loaded={load.engine: load.version for load in loads}.values(),
        keep_last=rules.keep_last,
        keep_every=rules.keep_every,
    )
    weights = {published[version].manifest for version in versions.union(sorted(stored)[-1:])}
    checkpoints = {states[version].checkpoint for version in sorted(published)[-rules.keep_last :]}
    return _Kept(weights | checkpoints, published[max(published)].published_at)
