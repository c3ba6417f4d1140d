"""Manifests: what a set of objects must contain, written last and verified on read.

A weights manifest lists content-addressed files with sizes and sha256, every tensor's name, shape and dtype, and a
canary: fixed token ids with the trainer's log-probabilities, by which an engine proves that it serves these weights.
Half a checkpoint is never read: without its manifest nothing is a candidate, and each file is checked against it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from pydantic import Field, ValidationError

from storage.objects import ObjectStore, sha256_file
from workflows.contracts import Message
from workflows.errors import StorageError


class ManifestFile(Message):
    name: str
    """Relative path below the checkpoint's folder, e.g. `model.safetensors`."""
    key: str
    bytes: int
    sha256: str


class TensorInfo(Message):
    name: str
    shape: list[int]
    dtype: str


class Canary(Message):
    """`logprobs[i]` is the trainer's natural-log probability of `token_ids[i]` given those before it, at temperature 1;
    `logprobs[0]` is 0.0."""

    token_ids: list[int]
    logprobs: list[float]


class Manifest(Message):
    """Files of one checkpoint; `kind` is `weights` (for engines), `training_state` (for the trainer) or `redo`: a state
    that was not saved, which is the state `base` after the updates on `batches`."""

    kind: str
    run: str
    version: int
    step: int
    world_size: int = 1
    files: list[ManifestFile]
    tensors: list[TensorInfo] = Field(default_factory=list)
    canary: Canary | None = None
    base: str = ""
    """Manifest key of the saved state that `redo` begins with."""
    batches: list[str] = Field(default_factory=list)
    """Ids of the batches that lead from there to this state, oldest first."""

    @property
    def digest(self) -> str:
        """Identity of the content: sha256 over names and digests of the files."""
        lines = "\n".join(f"{file.name} {file.sha256}" for file in sorted(self.files, key=lambda file: file.name))
        return hashlib.sha256(lines.encode()).hexdigest()

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def weights_key(run: str, version: int) -> str:
    return f"runs/{run}/weights/v{version:06d}/manifest.json"


def training_state_key(run: str, step: int, fence: int = 0) -> str:
    """Each try of an update (its fence) has a name of its own: an outdated try can't write over the committed one."""
    return f"runs/{run}/state/s{step:06d}/f{fence:04d}/manifest.json"


def objects_prefix(run: str) -> str:
    """Where the content of a run's weights and states lies, by sha256."""
    return f"runs/{run}/objects"


def upload_folder(
    store: ObjectStore, prefix: str, folder: Path, *, progress: Callable[[int], None]
) -> list[ManifestFile]:
    """Upload every file below `folder` under `prefix`, named by content. An object that is there with the right size
    is not sent again; `progress` gets the bytes of each piece."""
    files = []
    for path in sorted(item for item in folder.rglob("*") if item.is_file()):
        digest, size = sha256_file(path), path.stat().st_size
        key = f"{prefix}/{digest}"
        if (key, size) not in set(store.keys(key)):
            store.put_file(key, path, progress=progress)
        files.append(ManifestFile(name=str(path.relative_to(folder)), key=key, bytes=size, sha256=digest))
    return files


def write_manifest(store: ObjectStore, key: str, manifest: Manifest) -> None:
    """The last write of a publication: every object it names is there in its size, and it reads back as written.
    Raises StorageError (retryable) otherwise."""
    for file in manifest.files:
        if (file.key, file.bytes) not in set(store.keys(file.key)):
            raise StorageError(f"{key}: {file.name} is not in the store as {file.key} with {file.bytes} bytes")
    data = manifest.model_dump_json().encode()
    store.put(key, data)
    if store.get(key) != data:
        raise StorageError(f"{key}: the manifest read back differs from what was written")


def read_manifest(store: ObjectStore, key: str) -> Manifest:
    """Raises MissingObject where there is none, StorageError (final) where it can't be read."""
    try:
        return Manifest.model_validate_json(store.get(key))
    except ValidationError as error:
        raise StorageError(f"{key}: not a manifest: {error}", retryable=False) from error


def with_bases(store: ObjectStore, keys: set[str]) -> set[str]:
    """`keys` and the manifests without which those that are not saved could not be made again."""
    return keys | {base for key in keys if "/state/" in key and (base := read_manifest(store, key).base)}


def download_files(store: ObjectStore, manifest: Manifest, folder: Path, *, progress: Callable[[int], None]) -> None:
    """Bring `folder` to the manifest's files; files that are there and verify are kept. Raises StorageError (retryable)
    when a download does not verify."""
    for file in manifest.files:
        path = folder / file.name
        if path.exists() and path.stat().st_size == file.bytes and sha256_file(path) == file.sha256:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        store.get_file(file.key, path, progress=progress)
        if sha256_file(path) != file.sha256:
            path.unlink()
            raise StorageError(f"{file.key}: sha256 differs from the manifest")
