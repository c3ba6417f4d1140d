"""A version's files on their way to the object store: whole, or the weights as a delta upon the version before.

Called by `publish`. A delta is made where an engine has proven the version before, its weights are still on this
machine and the delta is less than half of them; and never more than `full_every` - 1 in a row, so that an engine
without a base has a bounded number to fetch. Anything else is a full set, which is always right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine
from sqlmodel import col, select

from activities.publication.delta import WrongDelta, element_width, make_delta
from activities.publication.manifest import (
    WEIGHTS_FILE,
    Delta,
    Manifest,
    ManifestFile,
    TensorInfo,
    read_manifest,
    upload_once,
)
from activities.publication.offers import Offers
from activities.training.engine import Trainer
from storage.database import session
from storage.objects import MissingObject, ObjectStore, sha256_file
from storage.tables import EngineLoad, Publication

LARGEST_SHARE = 0.5
"""Of the file that a delta may take; above it the full set goes."""


@dataclass(frozen=True)
class Before:
    """The version that was published before another."""

    key: str
    manifest: Manifest
    proven: bool
    """Whether an engine has shown that it can be loaded."""


def version_before(database: Engine, store: ObjectStore, *, run: str, version: int) -> Before | None:
    """None at a run's start, and where its manifest is gone."""
    earlier = select(Publication).where(Publication.run == run, col(Publication.version) < version)
    with session(database) as opened:
        row = opened.exec(earlier.order_by(col(Publication.version).desc())).first()
        if row is None:
            return None
        loads = select(EngineLoad).where(EngineLoad.run == run, EngineLoad.version == row.version, EngineLoad.proven)
        proven = opened.exec(loads).first() is not None
    try:
        return Before(row.manifest, read_manifest(store, row.manifest), proven)
    except MissingObject:
        return None


@dataclass(frozen=True)
class Sending:
    """The files below `folder`, to be sent under `prefix`; `delta` is where a delta is written."""

    store: ObjectStore
    folder: Path
    delta: Path
    prefix: str
    progress: Callable[[int], None]
    max_bytes_per_s: int = 0

    def compacted(
        self, files: list[ManifestFile], tensors: list[TensorInfo], before: Before, offers: Offers, full_every: int
    ) -> list[ManifestFile]:
        """`files` with the weights as a delta upon those of `before`, or as they are."""
        last, manifest = before.manifest.weights_file, before.manifest
        weights = next(file for file in files if file.name == WEIGHTS_FILE)
        if weights.sha256 == last.sha256 and last.key:
            compact: ManifestFile | None = last
        elif before.proven and last.key and len(last.deltas) + 1 < full_every and last.bytes == weights.bytes:
            compact = self._upon(last, weights, manifest.digest, element_width(tensors), offers)
        else:
            compact = None
        return [compact if compact and file is weights else file for file in files]

    def _upon(
        self, last: ManifestFile, weights: ManifestFile, digest: str, width: int, offers: Offers
    ) -> ManifestFile | None:
        base = offers.path(last.sha256)
        if not base.is_file():
            return None
        try:
            made = make_delta(
                base,
                self.folder / weights.name,
                self.delta,
                base_sha256=last.sha256,
                sha256=weights.sha256,
                width=width,
                limit=int(LARGEST_SHARE * weights.bytes),
                progress=self.progress,
            )
        except WrongDelta:
            base.unlink(missing_ok=True)
            return None
        if not made:
            return None
        sha256, size = sha256_file(self.delta), self.delta.stat().st_size
        delta = Delta(
            key=f"{self.prefix}/{sha256}", bytes=size, sha256=sha256, base_sha256=last.sha256, base_digest=digest
        )
        return weights.model_copy(update={"key": last.key, "deltas": [*last.deltas, delta]})

    def send(self, files: list[ManifestFile]) -> None:
        """Upload what the store lacks of `files`."""
        for file in files:
            key, path = (file.deltas[-1].key, self.delta) if file.deltas else (file.key, self.folder / file.name)
            if path.is_file():
                upload_once(self.store, key, path, progress=self.progress, max_bytes_per_s=self.max_bytes_per_s)


def room(trainer: Trainer, *, compact: bool) -> int:
    """Bytes of the weights on their way, with a delta at its largest where they may become one."""
    size = trainer.parameters * trainer.dtype.itemsize
    return size + int(LARGEST_SHARE * size / 2) if compact else size


def builds_on(files: list[ManifestFile], before: Before | None) -> str:
    """Key of the manifest whose weights the last delta of `files` is applied to; empty where they are whole."""
    last = next((file.deltas[-1] for file in files if file.deltas), None)
    if last is None or before is None:
        return ""
    return before.key if last.base_digest == before.manifest.digest else before.manifest.builds_on


def new_bytes(manifest: Manifest, before: Before | None) -> int:
    """What the version adds to the one before: objects in the store, and files that the trainer's machine hands out."""
    known = _content(before.manifest) if before else {}
    return sum(size for name, size in _content(manifest).items() if name not in known)


def _content(manifest: Manifest) -> dict[str, int]:
    return {name: size for file in manifest.files for name, size in (file.objects or {file.sha256: file.bytes}).items()}
