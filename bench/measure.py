"""What the benchmarks share: processor time of processes, medians, Markdown tables and the last line of JSON.

Pure but for the reads of /proc. Called by the commands of this folder.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Processor seconds, user and system, that a process has used, those of its ended children among them; 0.0 where
    it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return parse_cpu_s(text)


def parse_cpu_s(stat: str) -> float:
    """Processor seconds of a line of /proc/<pid>/stat; the name in it may hold blanks and brackets."""
    fields = stat.rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS_PER_S


def median_of(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure over the rounds that have it."""
    names = dict.fromkeys(name for one in rounds for name in one)
    return {name: statistics.median(one[name] for one in rounds if name in one) for name in names}


def overhead_pct(ours: float, plain: float) -> float:
    """By how many percent `ours` is longer than `plain`, which must be above 0."""
    return 100 * (ours / plain - 1)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; a float is shown with three digits that matter."""
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    lines += ["| " + " | ".join(shown(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def shown(cell: object) -> str:
    if cell is None:
        return "-"
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.3g}"


def say(line: str) -> None:
    """Progress, for the person who waits."""
    print(line, file=sys.stderr, flush=True)


def finish(result: Mapping[str, object]) -> None:
    """The result as the command's last line."""
    print(json.dumps(result), flush=True)


def positive_ints(text: str) -> list[int]:
    """`16,256` as [16, 256]. Raises ValueError for what is no list of positive whole numbers."""
    values = [int(item) for item in text.split(",")]
    if not values or min(values) < 1:
        raise ValueError(f"{text!r}: whole numbers above 0, separated by commas")
    return values
