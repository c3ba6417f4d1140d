"""Tasks from a folder: one .json or .toml file per task.

Owns the native file format. A file holds the fields of `tasksets.base.Task`; its name without the ending is the task's
id, so `id` may be left out. Files directly in the folder or under `train/` are the training split, files under
`held_out/` the held-out one. Opened through `tasksets.open_taskset(path)`. Example, `train/hello.toml`::

    kind = "write"
    instruction = "Write hello to the file greeting."
    setup = "mkdir -p /work"
    check = '[ "$(cat /work/greeting)" = hello ] || exit 1'
    oracle = ["echo hello > greeting"]
    oracle_answer = "done"
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from pydantic import ValidationError

from tasksets.base import Task
from workflows.contracts import Split
from workflows.errors import InvalidConfig


class FolderTaskset:
    """The tasks of one folder, read once. Raises InvalidConfig naming the file and the fault."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder.resolve())
        train = _read(folder) | _read(folder / "train")
        held_out = _read(folder / "held_out")
        both = train.keys() & held_out.keys()
        if both:
            raise InvalidConfig(f"{folder}: in both splits: {', '.join(sorted(both))}")
        if not train and not held_out:
            raise InvalidConfig(f"{folder}: no .json or .toml file with a task")
        self._ids = {Split.TRAIN: sorted(train), Split.HELD_OUT: sorted(held_out)}
        self._tasks = train | held_out

    def ids(self, split: Split) -> list[str]:
        return list(self._ids[split])

    def load(self, task_id: str) -> Task:
        if task_id not in self._tasks:
            raise InvalidConfig(f"{self.name} has no task {task_id!r}")
        return self._tasks[task_id]


def _read(folder: Path) -> dict[str, Task]:
    files = sorted(path for path in folder.glob("*") if path.suffix in (".json", ".toml"))
    tasks = {}
    for path in files:
        if path.stem in tasks:
            raise InvalidConfig(f"{path}: the task {path.stem} exists twice")
        tasks[path.stem] = _read_task(path)
    return tasks


def _read_task(path: Path) -> Task:
    try:
        text = path.read_text()
        fields = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        task = Task.model_validate({"id": path.stem, **fields})
    except (ValidationError, ValueError, TypeError) as error:
        raise InvalidConfig(f"{path}: {error}") from error
    if task.id != path.stem:
        raise InvalidConfig(f"{path}: id is {task.id!r}, the file's name says {path.stem!r}")
    return task
