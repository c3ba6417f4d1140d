"""Manifests: what a set of objects must contain, written last and verified on read.

A weights manifest lists content-addressed files with sizes and sha256, every tensor's name, shape, dtype and checksum,
and a canary: fixed token ids with the trainer's log-probabilities. By both an engine proves that it serves them.
Half a checkpoint is never read: without its manifest nothing is a candidate, and each file is checked against it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import Field, ValidationError

from activities.publication.checksums import checksums_of_file
from storage.objects import ObjectStore, sha256_file
from workflows.contracts import Message, WeightChannel
from workflows.errors import StorageError

WEIGHTS_FILE = "model.safetensors"


class Delta(Message):
    """An object that makes a file from another of the same size, as activities/publication/delta.py describes it."""

    key: str
    bytes: int
    sha256: str
    base_sha256: str
    """Of the file that it is applied to."""
    base_digest: str
    """`Manifest.digest` of the version that has that file, under the same name."""
    adapter_scale: float = 0.0
    """Above 0 the object is an adapter that is added at this scale, as activities/publication/adapters.py says."""


class AdapterBase(Message):
    """Weights that no update has touched, upon which every version's adapter is laid: `model.safetensors` of version
    `version`, whose `Manifest.digest` is `digest`."""

    key: str
    bytes: int
    sha256: str
    version: int
    digest: str


class ManifestFile(Message):
    name: str
    """Relative path below the checkpoint's folder, e.g. `model.safetensors`."""
    key: str
    """Object with the file; where it comes by `deltas`, with the file that the first of them is applied to."""
    bytes: int
    sha256: str
    """Of the file, however it comes."""
    deltas: list[Delta] = Field(default_factory=list)
    """The way from that object to the file, each applied to what the one before made."""

    @property
    def adapter(self) -> Delta | None:
        """By which it is made, where it is."""
        return next((delta for delta in self.deltas if delta.adapter_scale), None)

    @property
    def objects(self) -> dict[str, int]:
        """Key -> bytes of all that the store must have of it."""
        stored = {self.key: self.bytes} if self.key else {}
        return stored | {delta.key: delta.bytes for delta in self.deltas}


class TensorInfo(Message):
    name: str
    shape: list[int]
    dtype: str
    checksum: str = ""
    """As activities/publication/checksums.py makes it; empty where nobody did."""


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
    adapter_base: AdapterBase | None = None
    """Where an adapter trains upon weights that the store has."""
    channel: WeightChannel = WeightChannel.S3
    """How the weights come to the engines. Files without a key are handed out by the trainer's machine alone."""
    builds_on: str = ""
    """Manifest key of the version whose weights the last delta is applied to; empty where the files are whole."""
    max_mbytes_per_s: float = 0.0
    """What a download may take of the network; 0: all there is."""
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
    def stored(self) -> bool:
        """Whether the object store has every file."""
        return all(file.key for file in self.files)

    @property
    def weights_file(self) -> ManifestFile:
        return next(file for file in self.files if file.name == WEIGHTS_FILE)

    @property
    def total_bytes(self) -> int:
        """Of the files, whole."""
        return sum(file.bytes for file in self.files)

    @property
    def objects(self) -> dict[str, int]:
        """Key -> bytes of all objects without which its files, or those of versions after it, can't be had."""
        base = {self.adapter_base.key: self.adapter_base.bytes} if self.adapter_base else {}
        return base | {key: size for file in self.files for key, size in file.objects.items()}


def weights_key(run: str, version: int) -> str:
    return f"runs/{run}/weights/v{version:06d}/manifest.json"


def training_state_key(run: str, step: int, fence: int = 0) -> str:
    """Each try of an update (its fence) has a name of its own: an outdated try can't write over the committed one."""
    return f"runs/{run}/state/s{step:06d}/f{fence:04d}/manifest.json"


def objects_prefix(run: str) -> str:
    """Where the content of a run's weights and states lies, by sha256."""
    return f"runs/{run}/objects"


def listed_folder(folder: Path, prefix: str = "") -> list[ManifestFile]:
    """Every file below `folder`, named by content under `prefix`; without one, the object store has none of them."""
    files = []
    for path in sorted(item for item in folder.rglob("*") if item.is_file()):
        digest, name = sha256_file(path), str(path.relative_to(folder))
        key = f"{prefix}/{digest}" if prefix else ""
        files.append(ManifestFile(name=name, key=key, bytes=path.stat().st_size, sha256=digest))
    return files


def with_checksums(tensors: Iterable[TensorInfo], folder: Path) -> list[TensorInfo]:
    """`tensors` with the checksums that they have in the folder's weights."""
    found = checksums_of_file(folder / WEIGHTS_FILE)
    return [item.model_copy(update={"checksum": found[item.name]}) for item in tensors]


def upload_folder(
    store: ObjectStore, prefix: str, folder: Path, *, progress: Callable[[int], None]
) -> list[ManifestFile]:
    """Upload every file below `folder` under `prefix`, named by content; `progress` gets the bytes of each piece."""
    files = listed_folder(folder, prefix)
    for file in files:
        upload_once(store, file.key, folder / file.name, progress=progress)
    return files


def upload_once(
    store: ObjectStore, key: str, path: Path, *, progress: Callable[[int], None], max_bytes_per_s: int = 0
) -> None:
    """Upload a file under the name of its content. An object that is there in its size is not sent again."""
    if not holds(store, key, path.stat().st_size):
        store.put_file(key, path, progress=progress, max_bytes_per_s=max_bytes_per_s)


def holds(store: ObjectStore, key: str, size: int) -> bool:
    """Whether the store has an object of that name and size."""
    return (key, size) in set(store.keys(key))


def write_manifest(store: ObjectStore, key: str, manifest: Manifest) -> None:
    """The last write of a publication: every object it names is there in its size, and it reads back as written.
    Raises StorageError (retryable) otherwise."""
    for file in manifest.files:
        for name, size in file.objects.items():
            if not holds(store, name, size):
                raise StorageError(f"{key}: {file.name} is not in the store as {name} with {size} bytes")
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


def download_files(
    store: ObjectStore,
    manifest: Manifest,
    folder: Path,
    *,
    progress: Callable[[int], None],
    max_bytes_per_s: int = 0,
) -> int:
    """Bring `folder` to the manifest's files, which are whole objects; those that are there and verify are kept. The
    bytes that were moved. Raises StorageError (retryable) when a download does not verify."""
    moved = 0
    for file in manifest.files:
        path = folder / file.name
        if verifies(path, file):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        store.get_file(file.key, path, progress=progress, max_bytes_per_s=max_bytes_per_s)
        moved += file.bytes
        if sha256_file(path) != file.sha256:
            path.unlink()
            raise StorageError(f"{file.key}: sha256 differs from the manifest")
    return moved


def verifies(path: Path, file: ManifestFile) -> bool:
    """Whether the file is there, whole."""
    return path.is_file() and path.stat().st_size == file.bytes and sha256_file(path) == file.sha256
