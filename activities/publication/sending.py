"""A version's files on their way to the object store: whole, or the weights as a delta upon the version before, or by
the adapter that trains.

Called by `publish`. A delta is made where an engine has proven the version before, its weights are still on this
machine and the delta is less than half of them; and never more than `full_every` - 1 in a row, so that an engine
without a base has a bounded number to fetch. An adapter lies beside the weights as it is, and is laid upon the weights
that no update has touched; they go without saying where this machine finds that they make the version's, to the bit.
Anything else is a full set, which is always right.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine
from sqlmodel import col, select

from activities.publication.adapters import TENSORS_FILE, apply_adapter, changes_nothing, scale_of
from activities.publication.delta import WrongDelta, element_width, make_delta
from activities.publication.manifest import (
    WEIGHTS_FILE,
    AdapterBase,
    Delta,
    Manifest,
    ManifestFile,
    TensorInfo,
    holds,
    read_manifest,
    upload_once,
    weights_key,
)
from activities.publication.offers import Offers
from activities.training.engine import Trainer
from storage.database import session
from storage.objects import MissingObject, ObjectStore, sha256_file
from storage.tables import EngineLoad, Publication
from workflows.errors import StorageError

LARGEST_SHARE = 0.5
"""Of the file that a delta may take; above it the full set goes."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Before:
    """The version that was published before another."""

    key: str
    manifest: Manifest
    proven: bool
    """Whether an engine has shown that it can be loaded."""
    base_proven: bool = False
    """The same of the weights that an adapter is laid upon."""


def version_before(database: Engine, store: ObjectStore, *, run: str, version: int) -> Before | None:
    """None at a run's start, and where its manifest is gone or can't be read."""
    earlier = select(Publication).where(Publication.run == run, col(Publication.version) < version)
    with session(database) as opened:
        row = opened.exec(earlier.order_by(col(Publication.version).desc())).first()
        if row is None:
            return None
        loads = select(EngineLoad.version).where(EngineLoad.run == run, EngineLoad.proven)
        proven = set(opened.exec(loads.distinct()).all())
    try:
        manifest = read_manifest(store, row.manifest)
    except StorageError as error:
        if error.retryable:
            raise
        log.warning("nothing is built upon version %d: %s", row.version, error)
        return None
    base = manifest.adapter_base
    return Before(row.manifest, manifest, row.version in proven, base is not None and base.version in proven)


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
        there = bool(last.key) and self._has(last)
        if there and weights.sha256 == last.sha256:
            compact: ManifestFile | None = last
        elif by_adapter := self._by_adapter(files, weights, before, offers):
            compact = by_adapter
        elif there and before.proven and len(last.deltas) + 1 < full_every and last.bytes == weights.bytes:
            compact = self._upon(last, weights, manifest.digest, element_width(tensors), offers)
        else:
            compact = None
        return [compact if compact and file is weights else file for file in files]

    def _has(self, file: ManifestFile) -> bool:
        """Whether the store still has all that the file is made from."""
        return all(holds(self.store, key, size) for key, size in file.objects.items())

    def _by_adapter(
        self, files: list[ManifestFile], weights: ManifestFile, before: Before, offers: Offers
    ) -> ManifestFile | None:
        """The weights as what the version's adapter makes of the base; None where there is none that does."""
        base = before.manifest.adapter_base
        adapter = next((file for file in files if file.name == TENSORS_FILE), None)
        if base is None or adapter is None or not before.base_proven or adapter.bytes > LARGEST_SHARE * weights.bytes:
            return None
        scale = scale_of(self.folder)
        try:
            weights_below = self._base(base, offers)
            apply_adapter(
                weights_below,
                self.folder / TENSORS_FILE,
                self.delta,
                scale=scale,
                base_sha256=base.sha256,
                sha256=weights.sha256,
                progress=self.progress,
            )
        except (MissingObject, WrongDelta) as error:
            log.warning("the weights go whole, not by their adapter: %s", error)
            offers.path(base.sha256).unlink(missing_ok=True)
            return None
        self.delta.unlink()
        # Where the store has lost them, hosts that come later would find nothing to lay it upon.
        upload_once(self.store, base.key, weights_below, progress=self.progress, max_bytes_per_s=self.max_bytes_per_s)
        delta = Delta(
            key=adapter.key,
            bytes=adapter.bytes,
            sha256=adapter.sha256,
            base_sha256=base.sha256,
            base_digest=base.digest,
            adapter_scale=scale,
        )
        return weights.model_copy(update={"key": base.key, "deltas": [delta]})

    def _base(self, base: AdapterBase, offers: Offers) -> Path:
        """On this machine; fetched where another one, or none, has published the version before."""
        path = offers.path(base.sha256)
        if path.is_file():
            os.utime(path)
        else:
            fetched = self.delta.with_name("base")
            self.store.get_file(base.key, fetched, progress=self.progress, max_bytes_per_s=self.max_bytes_per_s)
            offers.put(fetched, base.sha256)
        return path

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
            # An adapter is sent as the file that it is; weights of before are there.
            if path.is_file():
                upload_once(self.store, key, path, progress=self.progress, max_bytes_per_s=self.max_bytes_per_s)


def room(trainer: Trainer, *, compact: bool, adapter: bool = False) -> int:
    """Bytes of the weights on their way, with a delta at its largest where they may become one, or with the base of an
    adapter and what the two make."""
    size = trainer.parameters * trainer.dtype.itemsize
    if not compact:
        return size
    return 3 * size if adapter else size + int(LARGEST_SHARE * size / 2)


def adapter_base(manifest: Manifest, before: Before | None, folder: Path) -> AdapterBase | None:
    """Upon which weights later versions' adapters are laid: as before, or else those of this version, in `folder`,
    where its adapter changes nothing yet."""
    if before is not None and before.manifest.adapter_base is not None:
        return before.manifest.adapter_base
    weights = manifest.weights_file
    if weights.deltas or not weights.key or not (folder / TENSORS_FILE).is_file() or not changes_nothing(folder):
        return None
    return AdapterBase(
        key=weights.key, bytes=weights.bytes, sha256=weights.sha256, version=manifest.version, digest=manifest.digest
    )


def builds_on(files: list[ManifestFile], before: Before | None) -> str:
    """Key of the manifest whose weights the last delta of `files` is applied to; empty where they are whole."""
    last = next((file.deltas[-1] for file in files if file.deltas), None)
    if last is None or before is None:
        return ""
    if last.adapter_scale and (base := before.manifest.adapter_base):
        return weights_key(before.manifest.run, base.version)
    return before.key if last.base_digest == before.manifest.digest else before.manifest.builds_on


def new_bytes(manifest: Manifest, before: Before | None) -> int:
    """What the version adds to the one before: objects in the store, and files that the trainer's machine hands out."""
    known = _content(before.manifest) if before else {}
    return sum(size for name, size in _content(manifest).items() if name not in known)


def _content(manifest: Manifest) -> dict[str, int]:
    return {name: size for file in manifest.files for name, size in (file.objects or {file.sha256: file.bytes}).items()}
