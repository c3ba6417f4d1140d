"""A version's files on their way from the object store: whole, or made from a base that this machine has. Called on
engine hosts.

Promises: a folder gets a file whole and verified or not at all; before a byte is written there is room for all.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from activities.publication.adapters import apply_adapter
from activities.publication.delta import WrongDelta, apply_delta
from activities.publication.manifest import Delta, Manifest, ManifestFile, download_files, verifies
from activities.training.transit import MARGIN_BYTES
from storage.objects import ObjectStore, sha256_file
from workflows.errors import StorageError

WORK = ".making"
"""Folder below the one that is filled, gone when it is."""


def fetch_version(
    store: ObjectStore,
    manifest: Manifest,
    folder: Path,
    bases: Mapping[str, Path],
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Bring `folder` to exactly the manifest's files; the bytes that were moved. `bases`: by sha256, files of earlier
    versions that are on this machine.

    Raises WrongDelta where a delta or a base is not what it should be, StorageError where a file can't be had, does not
    verify, or has no room here (retryable)."""
    folder.mkdir(parents=True, exist_ok=True)
    _clear(folder, {file.name for file in manifest.files})
    ways = [_way(file, bases) for file in manifest.files if not verifies(folder / file.name, file)]
    require_room(folder, sum(way.room for way in ways), manifest)
    max_bytes_per_s = math.ceil(manifest.max_mbytes_per_s * 1e6)

    def download(wanted: list[ManifestFile]) -> int:
        only = manifest.model_copy(update={"files": wanted})
        return download_files(store, only, folder, progress=progress, max_bytes_per_s=max_bytes_per_s)

    applied = {delta.sha256 for way in ways for delta in way.deltas}
    adapters = [file for file in manifest.files if file.sha256 in applied]
    moved = download(adapters)
    here = {file.sha256: folder / file.name for file in adapters}
    fetching = _Fetching(store, folder / WORK, progress, max_bytes_per_s, here)
    try:
        moved += sum(fetching.make(way, folder / way.file.name) for way in ways if way.deltas)
    finally:
        shutil.rmtree(folder / WORK, ignore_errors=True)
    return moved + download([way.file for way in ways if not way.deltas])


def require_room(folder: Path, needed: int, manifest: Manifest) -> None:
    """Raises StorageError (retryable), with the figures, where the disk can't take `needed` bytes more."""
    free, wanted = shutil.disk_usage(folder).free, needed + MARGIN_BYTES
    if needed and free < wanted:
        raise StorageError(
            f"{wanted / 1e6:,.0f} MB are needed at {folder.parent} for version {manifest.version} of {manifest.run}, "
            f"{free / 1e6:,.0f} MB are free: make room there"
        )


def _clear(folder: Path, names: set[str]) -> None:
    """Remove what a killed process left, or anyone put there: engines load what they find."""
    for path in [item for item in folder.rglob("*") if item.is_file()]:
        if str(path.relative_to(folder)) not in names:
            path.unlink()


@dataclass(frozen=True)
class _Way:
    """How a file is come by: from `base`, or where that is None from its object, by `deltas`."""

    file: ManifestFile
    base: Path | None
    deltas: list[Delta]

    @property
    def room(self) -> int:
        """Bytes on the disk at most: the file and what it is made from, and all the deltas."""
        fetched = 1 if (self.base and len(self.deltas) == 1) or not self.deltas else 2
        return fetched * self.file.bytes + sum(delta.bytes for delta in self.deltas)


def _way(file: ManifestFile, bases: Mapping[str, Path]) -> _Way:
    """From the latest base that is here."""
    for number, delta in reversed(list(enumerate(file.deltas))):
        if delta.base_sha256 in bases:
            return _Way(file, bases[delta.base_sha256], file.deltas[number:])
    return _Way(file, None, file.deltas)


@dataclass(frozen=True)
class _Fetching:
    store: ObjectStore
    work: Path
    progress: Callable[[int], None]
    max_bytes_per_s: int
    here: Mapping[str, Path]
    """By sha256, files of the version by which others are made: an adapter."""

    def make(self, way: _Way, target: Path) -> int:
        """Make the file by its deltas; the bytes that were moved."""
        self.work.mkdir(exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        # They are small: what is wrong with one shows before the large object is fetched.
        changes = [self._delta(number, delta) for number, delta in enumerate(way.deltas)]
        base, moved = way.base, sum(delta.bytes for delta in way.deltas if delta.sha256 not in self.here)
        if base is None:
            base, moved = self._whole(way.file), moved + way.file.bytes
        digests = [*(delta.base_sha256 for delta in way.deltas), way.file.sha256]
        for number, (delta, change) in enumerate(zip(way.deltas, changes, strict=True)):
            made = self.work / f"made{number}"
            before, after = digests[number : number + 2]
            apply = partial(apply_adapter, scale=delta.adapter_scale) if delta.adapter_scale else apply_delta
            apply(base, change, made, base_sha256=before, sha256=after, progress=self.progress)
            if base.parent == self.work:
                base.unlink()
            base = made
        base.replace(target)
        return moved

    def _delta(self, number: int, delta: Delta) -> Path:
        if delta.sha256 in self.here:
            return self.here[delta.sha256]
        path = self.work / f"delta{number}"
        self.store.get_file(delta.key, path, progress=self.progress, max_bytes_per_s=self.max_bytes_per_s)
        if sha256_file(path) != delta.sha256:
            raise WrongDelta(f"{delta.key}: sha256 differs from the manifest")
        return path

    def _whole(self, file: ManifestFile) -> Path:
        """The object that the deltas begin with."""
        path = self.work / "whole"
        self.store.get_file(file.key, path, progress=self.progress, max_bytes_per_s=self.max_bytes_per_s)
        if sha256_file(path) != file.deltas[0].base_sha256:
            raise StorageError(f"{file.key}: sha256 differs from the manifest")
        return path
