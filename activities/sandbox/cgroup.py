"""The sandboxes' common place in the CPU scheduler.

Agents' commands are short and the trainer and the engine beside them are greedy: their common parent gets a larger
share, so that a command's time says something about the command. Best effort: where this process may not write it, the
default share stays. Called by `DockerBackend`.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

PARENT = "/ratchet"
TIMES = 8
"""What all sandboxes together weigh against one other process, or one other group, beside them."""
SHARES = 1024
"""Everybody's under cgroup v1."""
WEIGHT = 100
"""Everybody's under cgroup v2."""


def cgroup_parent(info: dict[str, Any], parent: str = PARENT) -> str:
    """The parent to ask for, empty where the daemon's driver wants slices that it makes itself."""
    return parent if info.get("CgroupDriver") == "cgroupfs" else ""


def raise_share(parent: str, root: Path = Path("/sys/fs/cgroup"), *, times: int = TIMES) -> None:
    """Have the sandboxes weigh `times` what Docker's default gives them."""
    for path, default in _files(parent, root):
        with suppress(OSError):
            if path.is_file() and path.read_text().strip() != str(times * default):
                path.write_text(str(times * default))


def share(parent: str, root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """What the sandboxes weigh now, in times of everybody else; None where it can't be read."""
    for path, default in _files(parent, root):
        with suppress(OSError):
            return int(path.read_text()) / default
    return None


def _files(parent: str, root: Path) -> list[tuple[Path, int]]:
    name = parent.removeprefix("/")
    return [(root / "cpu" / name / "cpu.shares", SHARES), (root / name / "cpu.weight", WEIGHT)] if name else []
