"""A build context as the daemon takes it, and the hash of what is in it.

Pure but for reading the folder. Promises: the same files give the same bytes and the same key on every machine, however
they were checked out (times, owners and order are fixed); what `.dockerignore` names stays behind. Called by
`TaskImages`.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

IGNORE = ".dockerignore"
TIME = 1577836800
"""Of every file, 2020-01-01: some tools can't pack files from before 1980."""


def context_key(folder: Path, dockerfile: str, args: dict[str, str]) -> str:
    """Content hash of what a build gets."""
    digest = hashlib.sha256(f"{dockerfile}\0{sorted(args.items())}\0".encode())
    for name, path in context_files(folder, dockerfile):
        digest.update(f"{name}\0{path.lstat().st_mode & 0o777:o}\0".encode())
        digest.update(_content(path))
    return digest.hexdigest()[:24]


def write_context(folder: Path, dockerfile: str, text: str, target: IO[bytes]) -> None:
    """The context as a tar, with `text` as its Dockerfile."""
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, path in context_files(folder, dockerfile):
            if name == dockerfile:
                continue
            entry = tar.gettarinfo(path, name)
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mtime = TIME
            if entry.isreg():
                with path.open("rb") as file:
                    tar.addfile(entry, file)
            elif entry.isdir() or entry.issym():
                tar.addfile(entry)
        entry = tarfile.TarInfo(dockerfile)
        data = text.encode()
        entry.size, entry.mtime, entry.mode = len(data), TIME, 0o644
        tar.addfile(entry, io.BytesIO(data))


def context_files(folder: Path, dockerfile: str) -> Iterator[tuple[str, Path]]:
    """(name, path) of everything in the context, folders too, in order."""
    rules = _rules(folder / IGNORE)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name in (dockerfile, IGNORE) or not _ignored(name, rules):
            yield name, path


def _content(path: Path) -> bytes:
    if path.is_symlink():
        return b"-> " + str(path.readlink()).encode()
    if not path.is_file():
        return b"folder"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _rules(path: Path) -> list[tuple[bool, re.Pattern[str]]]:
    """(ignored, pattern) in their order; the last that fits decides."""
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return [(not pattern.startswith("!"), _regex(pattern.removeprefix("!").strip("/"))) for pattern in patterns]


def _regex(pattern: str) -> re.Pattern[str]:
    """Of a pattern of .dockerignore: it fits a path and all below it."""
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return re.compile("".join(words.get(part, re.escape(part)) for part in parts) + "(?:/.*)?")


def _ignored(name: str, rules: list[tuple[bool, re.Pattern[str]]]) -> bool:
    verdicts = [ignored for ignored, pattern in rules if pattern.fullmatch(name)]
    return bool(verdicts) and verdicts[-1]
