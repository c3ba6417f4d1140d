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
SHARES = 8192
"""cgroup v1; 1024 is everybody else's."""
WEIGHT = 800
"""cgroup v2; 100 is everybody else's."""


def cgroup_parent(info: dict[str, Any]) -> str:
    """The parent to ask for, empty where the daemon's driver wants slices that it makes itself."""
    return PARENT if info.get("CgroupDriver") == "cgroupfs" else ""


def raise_share(parent: str, root: Path = Path("/sys/fs/cgroup")) -> None:
    if not parent:
        return
    name = parent.removeprefix("/")
    for path, value in ((root / "cpu" / name / "cpu.shares", SHARES), (root / name / "cpu.weight", WEIGHT)):
        with suppress(OSError):
            if path.is_file() and path.read_text().strip() != str(value):
                path.write_text(str(value))
