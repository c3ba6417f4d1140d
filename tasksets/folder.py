"""Tasks from a folder, of any format, side by side: a file is a native task, a folder one of a public format.

Owns the native file format and the telling of formats apart. A native .json or .toml file holds the fields of
`tasksets.base.Task`; its name without the ending is the task's id, so `id` may be left out. A folder with a task.toml
is a Harbor task, one with a task.yaml a Terminal-Bench task; its name is the id. What lies directly in the folder or
under `train/` is the training split, what lies under `held_out/` the held-out one; a folder that is a task itself is a
taskset of one. `ratchet.toml` beside the tasks tunes those of the public formats (`tasksets.reading.Tuning`). Opened
through `tasksets.open_taskset(path)`. Example, `train/hello.toml`::

    kind = "write"
    instruction = "Write hello to the file greeting."
    setup = "mkdir -p /work"
    check = '[ "$(cat /work/greeting)" = hello ] || exit 1'
    oracle = ["echo hello > greeting"]
    oracle_answer = "done"
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tasksets import harbor, terminal_bench
from tasksets.base import Task
from tasksets.reading import TUNING, Tuning, Unsupported, faults, read_tuning
from workflows.contracts import Split
from workflows.errors import InvalidConfig

READERS: dict[str, Callable[[Path, Tuning], Task]] = {
    harbor.FILE: harbor.read_harbor,
    terminal_bench.FILE: terminal_bench.read_terminal_bench,
}
"""By the file that tells the format."""
UNREADABLE = (Unsupported, OSError, ValueError, RuntimeError)
"""What reading a public task may raise, whatever its files hold: one bad task costs the others nothing."""
SHOWN = 3
LEAST_MB = 160
"""Of a native service."""


class FolderTaskset:
    """The tasks of one folder, read once; a training task that comes later is found by whoever names it, and is in no
    split. Native files with faults raise InvalidConfig naming them; tasks of the public formats that Ratchet can't run
    are left out and reported."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder.resolve())
        self._folder = folder
        self.unsupported: dict[str, list[str]] = {}
        """Why tasks were left out, by their id."""
        if _reader(folder):
            # Whatever lies in it is the task's own; the tuning may be its own or that of the folder it lies in.
            tuning = read_tuning(folder if (folder / TUNING).is_file() else folder.resolve().parent)
            train, held_out = self._read_public([folder], tuning), {}
        else:
            tuning = read_tuning(folder)
            train = self._read(folder, tuning) | self._read(folder / "train", tuning)
            held_out = self._read(folder / "held_out", tuning)
        both = train.keys() & held_out.keys()
        if both:
            raise InvalidConfig(f"{folder}: in both splits: {', '.join(sorted(both))}")
        if not train and not held_out:
            raise InvalidConfig(self._why_nothing(folder))
        self._ids = {Split.TRAIN: sorted(train), Split.HELD_OUT: sorted(held_out)}
        self._tasks = train | held_out

    def ids(self, split: Split) -> list[str]:
        return list(self._ids[split])

    def load(self, task_id: str) -> Task:
        if task_id not in self._tasks and task_id not in self.unsupported:
            self._look_again(task_id)
        if task_id in self.unsupported:
            raise InvalidConfig(f"{self.name}: {task_id} can't be used: {'; '.join(self.unsupported[task_id])}")
        if task_id not in self._tasks:
            raise InvalidConfig(f"{self.name} has no task {task_id!r}")
        return self._tasks[task_id]

    def _look_again(self, task_id: str) -> None:
        """Take the task in if its files are in the folder by now. Raises InvalidConfig as the first reading does."""
        now = FolderTaskset(self._folder)
        if task_id in now._ids[Split.TRAIN]:
            self._tasks[task_id] = now._tasks[task_id]
        elif task_id in now.unsupported:
            self.unsupported[task_id] = now.unsupported[task_id]

    def _read(self, folder: Path, tuning: Tuning) -> dict[str, Task]:
        folders = sorted(path for path in folder.glob("*") if path.is_dir() and _reader(path))
        # A checkout of public tasks has other files beside them.
        tasks = _read_native(folder, sure=not folders)
        public = self._read_public(folders, tuning)
        if twice := tasks.keys() & (public.keys() | self.unsupported.keys()):
            raise InvalidConfig(f"{folder}: a file and a folder are the same task: {', '.join(sorted(twice))}")
        return tasks | public

    def _read_public(self, folders: list[Path], tuning: Tuning) -> dict[str, Task]:
        tasks = {}
        for path in folders:
            try:
                tasks[path.resolve().name] = _reader(path)(path.resolve(), tuning)  # type: ignore[misc]
            except UNREADABLE as error:
                self.unsupported[path.resolve().name] = faults(error)
        return tasks

    def _why_nothing(self, folder: Path) -> str:
        if not self.unsupported:
            return f"{folder}: no .json or .toml file with a task, and no folder with a task.toml or task.yaml"
        first = [f"{name} ({'; '.join(reasons)})" for name, reasons in self.unsupported.items()][:SHOWN]
        more = len(self.unsupported) - len(first)
        return f"{folder}: none of its tasks can be used: {', '.join(first)}{f' and {more} more' if more else ''}"


def _reader(folder: Path) -> Callable[[Path, Tuning], Task] | None:
    return next((reader for name, reader in READERS.items() if (folder / name).is_file()), None)


def _read_native(folder: Path, *, sure: bool) -> dict[str, Task]:
    """`sure`: every file is a task; else those that look like one are."""
    files = sorted(path for path in folder.glob("*") if path.suffix in (".json", ".toml") and path.name != TUNING)
    tasks: dict[str, Task] = {}
    for path in files:
        if path.is_dir() or (not sure and not _looks_like_one(path)):
            continue
        fields = _fields(path)
        if path.stem in tasks:
            raise InvalidConfig(f"{path}: the task {path.stem} exists twice")
        tasks[path.stem] = _read_task(path, fields)
    return tasks


def _looks_like_one(path: Path) -> bool:
    """Whether a file beside public tasks is to be a task: what other tools keep there may be no JSON at all."""
    try:
        fields = _fields(path)
    except InvalidConfig:
        words = path.read_text(errors="replace") if path.is_file() else ""
        return bool(re.search(r"""^\s*(check\s*=|"check"\s*:)""", words, re.MULTILINE))
    return isinstance(fields, dict) and "check" in fields


def _fields(path: Path) -> Any:
    """What a file says, before anything is made of it."""
    try:
        text = path.read_text()
        return tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidConfig(f"{path}: {error}") from error


def _with_files(path: Path, fields: Any) -> Any:
    """The same with services that name a file taken from there; what the task says itself goes over that."""
    services = fields.get("services") if isinstance(fields, dict) else None
    if not isinstance(services, list):
        return fields
    return {**fields, "services": [_service(path, given) for given in services]}


def _service(path: Path, given: Any) -> Any:
    if not isinstance(given, dict) or "file" not in given:
        return given
    source = path.parent / str(given["file"])
    if not source.is_file():
        raise InvalidConfig(f"{path}: there is no {given['file']}, of which a service is to be")
    shared = _fields(source)
    if not isinstance(shared, dict):
        raise InvalidConfig(f"{source}: no service")
    own = {name: value for name, value in given.items() if name != "file"}
    return {**shared, **own, "env": {**shared.get("env", {}), **own.get("env", {})}}


def _wrong_services(task: Task) -> str:
    """Why they can't be had; empty where they can."""
    names = [service.name for service in task.services]
    if len(set(names)) < len(names) or "localhost" in names:
        return f"services need names of their own, and none is localhost: {', '.join(names)}"
    for service in task.services:
        if service.image is not None:
            return f"service {service.name}: image belongs to the public formats, a native one has the task's"
        if not service.start or service.healthcheck is None:
            return f"service {service.name}: start and healthcheck say what it runs and when it is ready"
        if service.memory_mb < LEAST_MB:
            return f"service {service.name}: memory_mb is {LEAST_MB} at least, its file systems count in it"
    return ""


def _read_task(path: Path, fields: Any) -> Task:
    try:
        task = Task.model_validate({"id": path.stem, **_with_files(path, fields)})
    except (ValidationError, ValueError, TypeError) as error:
        raise InvalidConfig(f"{path}: {error}") from error
    if task.id != path.stem:
        raise InvalidConfig(f"{path}: id is {task.id!r}, the file's name says {path.stem!r}")
    if task.machine is not None or task.notes:
        raise InvalidConfig(f"{path}: machine and notes belong to the public formats, a native task has neither")
    if wrong := _wrong_services(task):
        raise InvalidConfig(f"{path}: {wrong}")
    return task
