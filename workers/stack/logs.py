"""Log files of the parts: bounded in size, and their last lines for messages. Called by the supervisor and the CLI."""

from __future__ import annotations

import shutil
from pathlib import Path

MAX_BYTES = 20 * 1024 * 1024
KEEP = 2
TAIL_BYTES = 64 * 1024


def rotate(log: Path, *, max_bytes: int = MAX_BYTES, keep: int = KEEP) -> bool:
    """Copy a log that has grown past `max_bytes` to `<log>.1` and empty it; True if it was done.

    The writer keeps its file open, also while no supervisor lives, so the file is emptied and not renamed: lines
    written between the copy and the cut are lost, at most a few.
    """
    if not log.is_file() or log.stat().st_size <= max_bytes:
        return False
    for number in range(keep, 1, -1):
        older = log.with_name(f"{log.name}.{number - 1}")
        if older.exists():
            older.replace(log.with_name(f"{log.name}.{number}"))
    shutil.copyfile(log, log.with_name(f"{log.name}.1"))
    with log.open("r+b") as file:
        file.truncate(0)
    return True


def tail(log: Path, lines: int = 20) -> str:
    """The last lines of a log, empty if there is none."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return "\n".join(text.splitlines()[-lines:])
