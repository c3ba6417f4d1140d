"""Objects of a published version that are damaged where they lie, and their replacement from the training state.

Called by `publish` when it is asked again because no engine could load the version. Objects are named by their content,
so that each can be judged by itself; what the trainer exports once more must be what was published, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from activities.publication.manifest import Manifest, ManifestFile
from storage.objects import MissingObject, ObjectStore, sha256_file
from workflows.errors import StorageError


def contents(file: ManifestFile) -> dict[str, str]:
    """Key -> sha256 of all objects that the store must have of the file."""
    if not file.deltas:
        return {file.key: file.sha256}
    return {file.key: file.deltas[0].base_sha256} | {delta.key: delta.sha256 for delta in file.deltas}


def damaged(store: ObjectStore, manifest: Manifest, folder: Path, *, progress: Callable[[int], None]) -> set[str]:
    """Keys of its objects that are missing or hold something else; each is fetched into `folder` for a moment."""
    found, path = set(), folder / "object"
    for key, sha256 in sorted({key: sha for file in manifest.files for key, sha in contents(file).items()}.items()):
        try:
            store.get_file(key, path, progress=progress)
        except MissingObject:
            found.add(key)
            continue
        if sha256_file(path) != sha256:
            found.add(key)
        path.unlink()
    return found


def replaced(manifest: Manifest, whole: Sequence[ManifestFile], gone: set[str]) -> tuple[Manifest, list[ManifestFile]]:
    """(the manifest that does without the objects `gone`, the files of `whole` that it needs uploaded for that).

    A file whose base or one of whose deltas is damaged becomes whole: the versions in between are not there to make
    them again. Raises StorageError (final) where `whole` has something else under its name."""
    hurt = {file.name: file.sha256 for file in manifest.files if gone & contents(file).keys()}
    again = [file for file in whole if hurt.get(file.name) == file.sha256]
    by_name = {file.name: file for file in again}
    if lost := sorted(hurt.keys() - by_name.keys()):
        raise StorageError(
            f"version {manifest.version} is lost: {', '.join(lost)} can't be made again as it was", retryable=False
        )
    files = [by_name.get(file.name, file) for file in manifest.files]
    builds_on = manifest.builds_on if any(file.deltas for file in files) else ""
    return manifest.model_copy(update={"files": files, "builds_on": builds_on}), again
