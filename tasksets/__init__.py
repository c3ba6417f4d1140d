"""Tasksets by name or path, and the order in which a run takes their tasks.

Owns the list of tasksets and the order. Promises: `pick` depends on its arguments alone, so a restarted run goes on
where it was. Called by the control activities (open a run, pick tasks), by acquire, generate and verify, and by tests.
"""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from weakref import WeakKeyDictionary

from tasksets.base import Task, Taskset
from tasksets.folder import FolderTaskset
from tasksets.shell import ShellTaskset
from workflows.contracts import Split, TaskRef
from workflows.errors import InvalidConfig

__all__ = ["Task", "Taskset", "first_cycle", "open_taskset", "pick"]

_BY_NAME = {ShellTaskset.name: ShellTaskset}


@lru_cache(maxsize=64)
def open_taskset(name_or_path: str) -> Taskset:
    """The taskset of that name, or the tasks of that folder, which a process reads once. Raises InvalidConfig naming
    what exists."""
    if name_or_path in _BY_NAME:
        return _BY_NAME[name_or_path]()
    if (folder := _folder(name_or_path)) is not None:
        return FolderTaskset(folder)
    names = ", ".join(sorted(_BY_NAME))
    raise InvalidConfig(f"no taskset {name_or_path!r}: give one of {names}, or a folder of tasks")


def _folder(path: str) -> Path | None:
    """None for what is none, as a name that no file can have."""
    try:
        folder = Path(path).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError, ValueError):
        return None


def pick(taskset: Taskset, split: Split, seed: int, cursor: int, count: int) -> list[TaskRef]:
    """`count` tasks from position `cursor` of the split's endless order for `seed`.

    Each cycle holds every task once. Its rounds take one task of every kind that has one left, so `count` tasks in a
    row are as balanced over kinds as the taskset allows. Raises InvalidConfig for a split without tasks.
    """
    kinds = _by_kind(taskset, split)
    size = sum(map(len, kinds.values()))
    if not size:
        raise InvalidConfig(f"the taskset {taskset.name} has no {split} tasks")
    cycles = range(cursor // size, (cursor + count - 1) // size + 1)
    order = [task_id for cycle in cycles for task_id in _cycle(kinds, _dice(seed, split, cycle))]
    start = cursor - cycles.start * size
    return [TaskRef(taskset=taskset.name, split=split, task_id=task_id) for task_id in order[start : start + count]]


def first_cycle(taskset: Taskset, split: Split, seed: int) -> list[str]:
    """Ids of all tasks of the split in the order in which `pick` meets them first; none for an empty one."""
    kinds = _by_kind(taskset, split)
    return _cycle(kinds, _dice(seed, split, 0)) if kinds else []


_KINDS: WeakKeyDictionary[Taskset, dict[Split, dict[str, list[str]]]] = WeakKeyDictionary()
"""What `_by_kind` found: a split never changes while it is open, and loading all its tasks takes a while."""


def _by_kind(taskset: Taskset, split: Split) -> dict[str, list[str]]:
    known = _KINDS.setdefault(taskset, {})
    if split not in known:
        kinds: dict[str, list[str]] = {}
        for task_id in taskset.ids(split):
            kinds.setdefault(taskset.load(task_id).kind, []).append(task_id)
        known[split] = kinds
    return known[split]


def _dice(seed: int, split: Split, cycle: int) -> random.Random:
    return random.Random(f"{seed}/{split}/{cycle}")


def _cycle(kinds: dict[str, list[str]], rng: random.Random) -> list[str]:
    """Every task once, kinds in turn; the order of kinds changes from round to round."""
    queues = [rng.sample(ids, len(ids)) for ids in kinds.values()]
    order = []
    for position in range(max(map(len, queues))):
        turn = [queue[position] for queue in queues if position < len(queue)]
        order += rng.sample(turn, len(turn))
    return order
