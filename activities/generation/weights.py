"""Weights on an engine's machine: downloaded, verified against their manifest and against the served model, kept short.

Promises: a folder handed out holds exactly what the manifest lists, and exactly the tensors that the engine's model
has; a load of anything else would take the server down or be accepted in part. Called by the engine loader.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import struct
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from activities.publication.manifest import Manifest, TensorInfo, download_files
from storage.objects import ObjectStore
from workflows.errors import EngineError

KEEP = 2
"""Versions that stay on the disk: the one served and the one before."""
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}
TIED_HEAD = "lm_head.weight"


class WeightsCache:
    """The local folder of a host's engines. For one event loop."""

    def __init__(self, store: ObjectStore, folder: Path) -> None:
        self._store = store
        self._folder = folder
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._users: Counter[str] = Counter()

    @asynccontextmanager
    async def verified(self, manifest: Manifest, model: Path) -> AsyncIterator[Path]:
        """A folder with the manifest's files, which stays while the context lasts.

        Raises StorageError where a file can't be had or differs from the manifest, EngineError (final) where its
        tensors are not those of the manifest and of `model`, the folder that the engine was started with.
        """
        folder = self._folder / manifest.digest[:32]
        self._users[folder.name] += 1
        try:
            async with self._locks[folder.name]:
                await asyncio.to_thread(self._fetch, manifest, folder, model)
            yield folder
        finally:
            self._users[folder.name] -= 1
        await self._prune()

    def _fetch(self, manifest: Manifest, folder: Path, model: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        download_files(self._store, manifest, folder, progress=lambda _: None)
        os.utime(folder)
        check_tensors(manifest.tensors, stored_tensors(folder), model)

    async def _prune(self) -> None:
        ordered = sorted(self._folder.iterdir(), key=lambda item: item.stat().st_mtime, reverse=True)
        for folder in ordered[KEEP:]:
            async with self._locks[folder.name]:
                if not self._users[folder.name]:
                    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


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
    """The format: 8 bytes little-endian length, a JSON header, then the bytes that its offsets divide."""
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if not 0 < length <= size - 8:
            raise EngineError(f"{path.name} is not a safetensors file", retryable=False)
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    end = max((item["data_offsets"][1] for item in header.values()), default=0)
    if size != 8 + length + end:
        raise EngineError(f"{path.name} has {size} bytes, its header says {8 + length + end}", retryable=False)
    return [
        TensorInfo(name=name, shape=item["shape"], dtype=DTYPES.get(item["dtype"], item["dtype"]))
        for name, item in header.items()
    ]
