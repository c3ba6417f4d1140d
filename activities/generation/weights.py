"""Weights on an engine's machine: downloaded, verified against their manifest and against the served model, kept short.

Promises: a folder handed out holds exactly what the manifest lists, and exactly the tensors that the engine's model
has; a load of anything else would take the server down or be accepted in part. Called by the engine loader.
"""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import shutil
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from activities.publication.delta import WrongDelta
from activities.publication.fetching import fetch_version
from activities.publication.manifest import WEIGHTS_FILE, Manifest, ManifestFile, TensorInfo
from activities.publication.tensors import DTYPES, read_header
from storage.objects import ObjectStore
from workflows.errors import EngineError, StorageError

KEEP = 2
"""Versions that stay on the disk: the one served and the one before."""
TIED_HEAD = "lm_head.weight"

log = logging.getLogger(__name__)


class Fetched(NamedTuple):
    """A version on this machine."""

    path: Path
    bytes_moved: int
    """What came over the network for it; 0 where all was here."""


class WeightsCache:
    """The local folder of a host's engines. For one event loop."""

    def __init__(self, store: ObjectStore, folder: Path) -> None:
        self._store = store
        self._folder = folder
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._users: Counter[str] = Counter()

    @asynccontextmanager
    async def verified(self, manifest: Manifest, model: Path) -> AsyncIterator[Fetched]:
        """A folder with the manifest's files, which stays while the context lasts; so do those that it is made from.

        Raises StorageError where a file can't be had or differs from the manifest, EngineError (final) where its
        tensors are not those of the manifest and of `model`, the folder that the engine was started with.
        """
        folder = self._folder / _name(manifest.digest)
        based_on = {_name(delta.base_digest) for file in manifest.files for delta in file.deltas}
        names, moved = [folder.name, *based_on], 0
        self._users.update(names)
        try:
            if base := self._adapter_base(manifest):
                async with self._locks[base.parent.name]:
                    moved += await _to_its_end(partial(self._fetch_base, manifest, base))
            async with self._locks[folder.name]:
                moved += await _to_its_end(partial(self._fetch, manifest, folder, model))
            yield Fetched(folder, moved)
        finally:
            self._users.subtract(names)
        await self._prune({base.parent.name} if base else set())

    def _adapter_base(self, manifest: Manifest) -> Path | None:
        """Where the weights are, or will be, upon which the manifest's adapter is laid."""
        adapter = manifest.weights_file.adapter
        return self._folder / _name(adapter.base_digest) / WEIGHTS_FILE if adapter else None

    def _fetch_base(self, manifest: Manifest, base: Path, progress: Callable[[int], None]) -> int:
        """Have the base of an adapter here, for this version and those to come; the bytes that were moved."""
        if base.is_file():
            return 0
        file = manifest.weights_file
        whole = ManifestFile(name=file.name, key=file.key, bytes=file.bytes, sha256=file.deltas[0].base_sha256)
        only = manifest.model_copy(update={"files": [whole]})
        return fetch_version(self._store, only, base.parent, {}, progress=progress)

    def _fetch(self, manifest: Manifest, folder: Path, model: Path, progress: Callable[[int], None]) -> int:
        bases = self._bases(manifest)
        try:
            moved = fetch_version(self._store, manifest, folder, bases, progress=progress)
        except WrongDelta as error:
            if not bases:
                raise
            log.warning("version %d of %s: %s; fetching it whole", manifest.version, manifest.run, error)
            moved = fetch_version(self._store, manifest, folder, {}, progress=progress)
            if base := self._adapter_base(manifest):
                # It was damaged, and would be for every version to come.
                base.unlink(missing_ok=True)
        os.utime(folder)
        check_tensors(manifest.tensors, stored_tensors(folder), model)
        return moved

    def _bases(self, manifest: Manifest) -> dict[str, Path]:
        """By sha256, files of earlier versions that are here and that the manifest's are made from."""
        places = {
            delta.base_sha256: self._folder / _name(delta.base_digest) / file.name
            for file in manifest.files
            for delta in file.deltas
        }
        return {sha256: path for sha256, path in places.items() if path.is_file()}

    async def _prune(self, bases: set[str]) -> None:
        """Remove all but the last versions and `bases`, which those to come are made from."""
        others = [item for item in self._folder.iterdir() if item.name not in bases]
        ordered = sorted(others, key=_written_at, reverse=True)
        for folder in [item for item in ordered[KEEP:] if self._users[item.name] <= 0]:
            async with self._locks[folder.name]:
                if self._users[folder.name] <= 0:
                    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _written_at(folder: Path) -> float:
    """0.0 for one that went meanwhile, with another engine's prune."""
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _name(digest: str) -> str:
    """Of a version's folder."""
    return digest[:32]


async def _to_its_end(work: Callable[[Callable[[int], None]], int]) -> int:
    """Run `work` in a thread. When cancelled it is told to stop, by what it calls with its progress, and waited for:
    nobody else may write where it does."""
    stop = threading.Event()

    def progress(_: int) -> None:
        if stop.is_set():
            raise StorageError("nobody waits for this download any more")

    task = asyncio.ensure_future(asyncio.to_thread(work, progress))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([task])
        task.exception()
        raise


def check_tensors(listed: Iterable[TensorInfo], stored: Iterable[TensorInfo], model: Path) -> None:
    """Name, shape and dtype of the stored tensors are the manifest's; name and shape are the model's, both ways.

    Raises EngineError (final) with the faults.
    """
    manifest, found = ({item.name: item for item in tensors} for tensors in (listed, stored))
    faults = _differences(manifest, found, "in the file", "in the manifest")
    dtypes = [(name, found[name].dtype, manifest[name].dtype) for name in sorted(manifest.keys() & found.keys())]
    faults += [f"{name} is {mine}, {theirs} in the manifest" for name, mine, theirs in dtypes if mine != theirs]
    served = {item.name: item for item in stored_tensors(model)}
    if json.loads((model / "config.json").read_text()).get("tie_word_embeddings"):
        for tensors in (served, found):
            tensors.pop(TIED_HEAD, None)
    faults += _differences(served, found, "in the file", f"in {model.name}")
    if faults:
        raise EngineError(f"not loaded: {'; '.join(faults[:6])}", retryable=False)


def _differences(expected: dict[str, TensorInfo], found: dict[str, TensorInfo], here: str, there: str) -> list[str]:
    faults = [f"{name} is not {here}" for name in sorted(expected.keys() - found.keys())]
    faults += [f"{name} is not {there}" for name in sorted(found.keys() - expected.keys())]
    shapes = [(name, found[name].shape, expected[name].shape) for name in sorted(expected.keys() & found.keys())]
    return faults + [f"{name} is {mine} {here}, {theirs} {there}" for name, mine, theirs in shapes if mine != theirs]


def stored_tensors(folder: Path) -> list[TensorInfo]:
    """What the safetensors files of a folder say that they hold. Raises EngineError (final) for a file cut short."""
    return [item for path in sorted(folder.glob("*.safetensors")) for item in _read_header(path)]


def _read_header(path: Path) -> list[TensorInfo]:
    """Raises EngineError (final) where its header and its size are not those of a whole safetensors file."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            header, begin = read_header(mapped)
    except ValueError as error:
        raise EngineError(f"{path.name} is not a safetensors file", retryable=False) from error
    end = max((item["data_offsets"][1] for item in header.values()), default=0)
    if size != begin + end:
        raise EngineError(f"{path.name} has {size} bytes, its header says {begin + end}", retryable=False)
    return [
        TensorInfo(name=name, shape=item["shape"], dtype=DTYPES.get(item["dtype"], item["dtype"]))
        for name, item in header.items()
    ]
