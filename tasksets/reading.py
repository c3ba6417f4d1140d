"""What the readers of the public formats share: files as they are, reasons why a task can't be used, phases' limits.

Pure reading: no daemon, no network, nothing is run. A reader collects every reason before it gives up, so that one look
tells all. Called by `tasksets.harbor`, `tasksets.terminal_bench`, `tasksets.compose` and `tasksets.folder`.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workflows.errors import InvalidConfig

TUNING = "ratchet.toml"
"""Name of the file beside the tasks that says what their own files can't."""
TESTS = "/tests"
"""Where the tests are in a machine that grades."""
MOST_MULTIPLIED = 1000.0


class Unsupported(Exception):
    """A task that Ratchet can't run as it is, with every reason."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


class TaskTuning(BaseModel):
    """What `[tasks.<id>]` says of one task of a public format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    may_change: list[str] = []
    """Trusted files and folders that an honest answer changes."""
    artifacts: list[str] | None = None
    """Grade the pristine image with these paths of the agent's machine and nothing else of it."""
    expected_tests: list[str] | None = None
    """Instead of those that are found in the tests' files."""


class Tuning(BaseModel):
    """`ratchet.toml` beside the tasks: how much longer than written their phases may last, and per-task settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeout_multiplier: float = Field(1.0, gt=0, le=MOST_MULTIPLIED)
    """Of every phase that has none of its own."""
    agent_timeout_multiplier: float | None = Field(None, gt=0, le=MOST_MULTIPLIED)
    verifier_timeout_multiplier: float | None = Field(None, gt=0, le=MOST_MULTIPLIED)
    build_timeout_multiplier: float | None = Field(None, gt=0, le=MOST_MULTIPLIED)
    tasks: dict[str, TaskTuning] = {}

    def agent_s(self, seconds: float | None) -> float | None:
        return None if seconds is None else seconds * (self.agent_timeout_multiplier or self.timeout_multiplier)

    def verifier_s(self, seconds: float) -> float:
        return seconds * (self.verifier_timeout_multiplier or self.timeout_multiplier)

    def build_s(self, seconds: float) -> float:
        return seconds * (self.build_timeout_multiplier or self.timeout_multiplier)

    def of(self, task_id: str) -> TaskTuning:
        return self.tasks.get(task_id, TaskTuning())


def faults(error: Exception) -> list[str]:
    """Why a task can't be used, from whatever reading it raised."""
    if isinstance(error, Unsupported):
        return error.reasons
    if isinstance(error, ValidationError):
        return [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
    return [f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"]


def read_tuning(folder: Path) -> Tuning:
    """The tuning of a folder of tasks, the default where there is none. Raises InvalidConfig."""
    path = folder / TUNING
    if not path.is_file():
        return Tuning()
    try:
        return Tuning.model_validate(tomllib.loads(path.read_text()))
    except (ValidationError, ValueError) as error:
        raise InvalidConfig(f"{path}: {error}") from error


def leaving(folder: Path, *paths: Path) -> list[str]:
    """Which of these paths, or of what is below them, lead out of the folder, as reasons."""
    root = folder.resolve()
    links = [item for path in paths if path.is_dir() for item in sorted(path.rglob("*")) if item.is_symlink()]
    # One that leads nowhere on this host is a machine's own.
    below = [item for item in links if item.exists()]
    return [
        f"{path.relative_to(folder)} leads out of the task's folder"
        for path in (*paths, *below)
        if not path.resolve().is_relative_to(root)
    ]


def read_text(path: Path) -> str:
    """Raises Unsupported where it is not there or no text."""
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        raise Unsupported([f"{path.name} can't be read: {error}"]) from error


_VARIABLE = re.compile(r"\$(?:\$|\{(?P<braced>\w+)(?::?-(?P<default>[^}]*))?\}|(?P<bare>[A-Za-z_]\w*))")


def interpolate(text: str, known: dict[str, str], missing: list[str]) -> str:
    """`text` with `${NAME}`, `${NAME:-default}` and `$NAME` replaced; names without a value go to `missing`.

    Example: interpolate("${A:-b}/$C", {"C": "d"}, []) == "b/d"."""

    def value(match: re.Match[str]) -> str:
        name = match["braced"] or match["bare"]
        if name is None:
            return "$"
        if name in known:
            return known[name]
        if match["default"] is None:
            missing.append(name)
        return match["default"] or ""

    return _VARIABLE.sub(value, text)


def interpolate_all(given: dict[str, Any], what: str, reasons: list[str]) -> dict[str, str]:
    """Variables as Harbor writes them: `${NAME:-default}` is its default, a `$` without braces is itself; those that
    want a value of the host's are reasons."""
    found: dict[str, str] = {}
    for name, value in given.items():
        missing: list[str] = []
        # In a compose file a dollar is two.
        text = re.sub(r"\$(?!\{)", "$$", str(value))
        found[name] = interpolate(text, {}, missing)
        reasons += [f"{what}: {name} needs the host's variable {absent}" for absent in missing]
    return found
