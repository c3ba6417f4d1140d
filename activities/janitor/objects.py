"""The objects of a run that is over: which manifests stay, and the removal of what nothing that stays refers to.

Called by the janitor, in a thread.
"""

from __future__ import annotations

from sqlalchemy import Engine
from sqlmodel import Session, col, select

from activities.janitor.rules import kept_versions, unreferenced
from activities.publication.manifest import objects_prefix, read_manifest, with_bases
from activities.publication.retention import MANIFEST, Removed
from storage import queries
from storage.database import session
from storage.objects import ObjectStore, StoredObject
from storage.tables import EngineLoad, Evaluation, PolicyVersion, Publication
from workflows.config import PublicationConfig

MOST = 2000
"""Objects of a run that one pass removes."""


def sweep_run(store: ObjectStore, database: Engine, *, run: str, keep: PublicationConfig, before: float) -> Removed:
    """Remove what was written before `before` (seconds since the epoch) and is referred to by nothing.

    Raises StorageError, having removed no object, where a manifest that stays can't be read."""
    objects = list(store.objects(f"{objects_prefix(run)}/"))
    manifests = _manifests(store, run)
    with session(database) as opened:
        referred = referred_manifests(opened, run=run, keep=keep)
    referred |= _last_stored(store, manifests)
    referred = with_bases(store, referred & {item.key for item in manifests})
    gone = unreferenced(manifests, referred, before=before)[:MOST]
    stays = {item.key for item in manifests} - {item.key for item in gone}
    files = {name for key in sorted(stays) for name in read_manifest(store, key).objects}
    orphans = unreferenced(objects, files, before=before)[:MOST]
    store.delete([item.key for item in gone])
    store.delete([item.key for item in orphans])
    return Removed(manifests=len(gone), objects=len(orphans), bytes=sum(item.bytes for item in orphans))


def _last_stored(store: ObjectStore, manifests: list[StoredObject]) -> set[str]:
    """The newest weights that the object store has at all: those after it may have been handed out directly."""
    weights = sorted((item.key for item in manifests if "/weights/" in item.key), reverse=True)
    return set(next(([key] for key in weights if read_manifest(store, key).stored), []))


def _manifests(store: ObjectStore, run: str) -> list[StoredObject]:
    kinds = (f"runs/{run}/{kind}/" for kind in ("weights", "state"))
    return [item for prefix in kinds for item in store.objects(prefix) if item.key.endswith(MANIFEST)]


def referred_manifests(opened: Session, *, run: str, keep: PublicationConfig) -> set[str]:
    """Keys of the manifests that lineage still refers to: of the versions that stay with the states that they came
    from, and of the run's last checkpoint, from which another run may start."""
    published = {row.version: row for row in opened.exec(select(Publication).where(Publication.run == run))}
    states = {row.version: row for row in opened.exec(select(PolicyVersion).where(PolicyVersion.run == run))}
    evaluated = opened.exec(select(Evaluation.version).where(Evaluation.run == run)).all()
    kept = kept_versions(published, in_use=_in_use(opened, run), evaluated=evaluated, keep=keep)
    weights = {published[version].manifest for version in kept}
    checkpoints = {states[version].checkpoint for version in kept & states.keys()}
    return (weights | checkpoints | {queries.last_checkpoint(opened, run=run)}) - {""}


def _in_use(opened: Session, run: str) -> set[int]:
    """Versions of the run that are an engine's last proven load or its last load at all."""
    loads = opened.exec(select(EngineLoad).order_by(col(EngineLoad.loaded_at))).all()
    last = {load.engine: load for load in loads}
    proven = {load.engine: load for load in loads if load.proven}
    return {load.version for load in (*last.values(), *proven.values()) if load.run == run}
