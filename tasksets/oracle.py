"""A solution's files as commands of an agent: what an oracle does, done as the agent would have to do it.

Pure. The commands write the files into a folder of the machine and run them there, so that an oracle goes the same way
as a model, through the same shell, with the same rights. Called by the readers of the public formats.
"""

from __future__ import annotations

import base64
import shlex
from pathlib import Path

from tasksets.reading import Unsupported

PIECE = 24 << 10
"""Bytes of a file in one command: a message holds 64 KiB, a word of a command line 128."""
MOST_BYTES = 16 << 20


def oracle_commands(files: dict[str, Path], folder: str, run: str) -> list[str]:
    """Commands that write `files` (by their names below `folder`) and then run `run`. Raises Unsupported where they are
    too large for that."""
    if sum(path.stat().st_size for path in files.values()) > MOST_BYTES:
        raise Unsupported([f"the solution has more than {MOST_BYTES >> 20} MiB"])
    steps: list[str] = []
    for name, path in files.items():
        target = f"{folder}/{name}"
        steps += [f"mkdir -p {shlex.quote(target.rpartition('/')[0])}", *_written(target, path.read_bytes())]
        if path.stat().st_mode & 0o111:
            steps.append(f"chmod +x {shlex.quote(target)}")
    return _joined([*steps, run])


def folder_files(folder: Path) -> dict[str, Path]:
    """All files below a folder by their names there, in order."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _written(target: str, data: bytes) -> list[str]:
    quoted = shlex.quote(target)
    pieces = [data[start : start + PIECE] for start in range(0, len(data), PIECE)] or [b""]
    return [f"{_piece(piece)} {'>>' if number else '>'} {quoted}" for number, piece in enumerate(pieces)]


def _piece(piece: bytes) -> str:
    """A command that prints these bytes: readable where they are text of whole lines."""
    try:
        text = piece.decode()
    except UnicodeDecodeError:
        text = ""
    if text.endswith("\n") and "\0" not in text and "\r" not in text:
        quoted = shlex.quote(text)
        if len(quoted) < 2 * PIECE:
            return f"printf %s {quoted}"
    return f"printf %s {base64.b64encode(piece).decode()} | base64 -d"


def _joined(steps: list[str]) -> list[str]:
    """Several steps in one command as long as they fit; each must succeed for the next."""
    commands: list[str] = []
    for step in steps:
        if commands and len(commands[-1].encode()) + len(step.encode()) < 2 * PIECE:
            commands[-1] += f" &&\n{step}"
        else:
            commands.append(step)
    return commands
