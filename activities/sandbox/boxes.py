"""The folders on this host that belong to sandboxes: `<state>/sandboxes/<id>/{labels.json,box/}`.

Owns whose a folder is. `box` is mounted into the container and holds sbxd's socket and journal; `labels.json` stays on
the host's side and is the word on whose sandbox it is: a container that was started before anyone asked has its own
labels for ever, those of the attempt that took it are here. The parent is closed to other users, `box` itself is open
so that a remapped root can write there. Called by `DockerBackend` and `Members`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from workflows.errors import SandboxError

CONTAINER = "ratchet.container"
"""Label of the container's name, where it is not the sandbox's id."""
SERVICES = "ratchet.services"
"""Label of the ids of the services that stand beside it by their names, as JSON."""
RELEASED = "released"
"""Name of the file that says: its attempt needs it no more."""


@contextmanager
def named_disk() -> Iterator[None]:
    """What this machine's own disk or tools fail at comes out as SandboxError: the sandboxes' host is failing."""
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(f"the state folder of the sandboxes: {error}") from error


@dataclass(frozen=True)
class Folder:
    """One folder as it was found; `age_s` since it was made, emptied or taken by its attempt."""

    labels: dict[str, str]
    age_s: float


class Boxes:
    def __init__(self, root: Path) -> None:
        self.root = root

    def box(self, sandbox_id: str) -> Path:
        return self.root / sandbox_id / "box"

    def make(self, sandbox_id: str, labels: dict[str, str]) -> Path:
        """A fresh, empty box."""
        self.remove(sandbox_id)
        return make_folder(self.root / sandbox_id, labels)

    def there(self, sandbox_id: str) -> bool:
        return (self.root / sandbox_id).is_dir()

    def labels(self, sandbox_id: str) -> dict[str, str]:
        return read_labels(self.root / sandbox_id)

    def add_labels(self, sandbox_id: str, labels: dict[str, str]) -> None:
        """To those that it has."""
        folder = self.root / sandbox_id
        write_labels(folder, read_labels(folder) | labels)

    def services(self, sandbox_id: str) -> dict[str, str]:
        """Ids of the services beside it by their names, whether they are there or not; they go with it."""
        found: dict[str, str] = json.loads(self.labels(sandbox_id).get(SERVICES, "{}"))
        return found

    def add_service(self, sandbox_id: str, name: str, service_id: str) -> None:
        """Before there is anything of it."""
        self.add_labels(sandbox_id, {SERVICES: json.dumps(self.services(sandbox_id) | {name: service_id})})

    def container(self, sandbox_id: str) -> str:
        """The name of its container, whether that is there or not."""
        return self.labels(sandbox_id).get(CONTAINER, sandbox_id)

    def remove(self, sandbox_id: str) -> bool:
        """Idempotent; whether there was one."""
        folder = self.root / sandbox_id
        there = folder.is_dir()
        shutil.rmtree(folder, ignore_errors=True)
        return there

    def all(self, now: float) -> dict[str, Folder]:
        """By sandbox id."""
        return folders_below(self.root, now)

    def having(self, name: str, value: str) -> list[str]:
        """Sandbox ids whose folder carries this label."""
        return [found for found, folder in self.all(0.0).items() if folder.labels.get(name) == value]

    def release(self, sandbox_id: str) -> None:
        """Mark it as needed no more: whoever finds it so may finish its removal."""
        with suppress(FileNotFoundError):
            (self.root / sandbox_id / RELEASED).touch()

    def released(self) -> list[str]:
        return [path.parent.name for path in self.root.glob(f"*/{RELEASED}")]


def make_folder(folder: Path, labels: dict[str, str]) -> Path:
    """A sandbox's folder with an empty box, and the box."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.parent.chmod(0o700)
    box = folder / "box"
    box.mkdir(parents=True)
    box.chmod(0o777)
    write_labels(folder, labels)
    return box


def write_labels(folder: Path, labels: dict[str, str]) -> None:
    """Whole or not at all."""
    fresh = folder / f"labels.{os.getpid()}.part"
    fresh.write_text(json.dumps(labels))
    fresh.replace(folder / "labels.json")


def read_labels(folder: Path) -> dict[str, str]:
    """Empty where there is none."""
    with suppress(FileNotFoundError, NotADirectoryError):
        loaded: dict[str, str] = json.loads((folder / "labels.json").read_text() or "{}")
        return loaded
    return {}


def folders_below(root: Path, now: float) -> dict[str, Folder]:
    """The sandboxes' folders in `root`, by name."""
    found: dict[str, Folder] = {}
    for folder in root.glob("*"):
        with suppress(FileNotFoundError):
            found[folder.name] = Folder(read_labels(folder), now - folder.stat().st_mtime)
    return found
