"""A long-tailed workload from the taskset `shell`: a folder of tasks, and the image whose shell they are done in.

Owns which tasks are slow, long or of many turns. How long a task's commands take is log-normal over the tasks, as the
times of builds, downloads and test runs are: most take about the median, one in eight four times that, one in thirty
ten times. Promises: the same seed gives the same folder, byte for byte; a task is still solved by what solves it in
`shell`. A task's environment says how its shell behaves, in files that its setup
writes below /data/.bench: `pace` is how many seconds a command waits before it does its work, as a build, a download
or a test run does; `busy` is how many commands are answered with `NOT_READY` first, a sentence that this policy has
learnt to go on after. The verifier's own shell, on its trusted path, is not slowed. Called by collection.py; both
collectors get the same folder.
"""

from __future__ import annotations

import io
import math
import random
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from activities.generation.harness import parse_action
from activities.sandbox.image import Layer, busybox_layer
from tasksets.base import Task
from tasksets.shell import KINDS, WORDS, ShellTaskset

TASKS_PER_KIND = 40
SLOW = 4.0
"""Times the median: commands that take longer are slow."""
BUSY = ((0.85, 0), (0.10, 2), (0.05, 4))
"""(share of the tasks, commands that are answered with NOT_READY first)."""
LONG_SHARE = 0.5
"""Of the tasks that ask for a value: those whose value is long."""
LONG_WORDS = 12
NOT_READY = parse_action("").error
_SHELL = """#!/bin/busybox sh
if [ -r /data/.bench/pace ]; then
  read -r seconds < /data/.bench/pace
  sleep "$seconds"
fi
if [ -r /data/.bench/busy ]; then
  read -r calls < /data/.bench/busy
  made=$(ls /tmp/.busy 2>/dev/null | wc -l)
  if [ "$made" -lt "$calls" ]; then
    mkdir -p /tmp/.busy/"$made"
    cat /data/.bench/not-ready
    exit 0
  fi
fi
exec /bin/busybox sh "$@"
"""


@dataclass(frozen=True)
class Tail:
    """How many seconds a task's commands take: the median over the tasks, the standard deviation of the logarithm, and
    the bound that a step's time-out sets."""

    median_s: float = 20.0
    sigma: float = 1.25
    longest_s: float = 300.0

    def draw(self, rng: random.Random) -> float:
        return round(min(self.longest_s, self.median_s * math.exp(rng.gauss(0.0, self.sigma))), 2)


TAIL = Tail()


@dataclass(frozen=True)
class Load:
    """What a task's environment adds. `long`: its answer has many words; `slow`: it takes more time than most, for its
    commands or for their number."""

    pace_s: float
    busy: int
    long: bool
    slow: bool


def load_of(task_id: str, seed: int, tail: Tail = TAIL) -> Load:
    rng = random.Random(f"long-tail/{seed}/{task_id}")
    pace, busy = tail.draw(rng), _draw(rng, BUSY)
    slow = pace > SLOW * tail.median_s or busy > 0
    return Load(pace_s=pace, busy=busy, long=rng.random() < LONG_SHARE, slow=slow)


def _draw(rng: random.Random, shares: tuple[tuple[float, int], ...]) -> int:
    point = rng.random()
    for share, value in shares:
        point -= share
        if point < 0:
            return value
    return shares[-1][1]


def tasks(image_id: str, seed: int, tail: Tail = TAIL) -> Iterator[Task]:
    """The workload's tasks, on the image with the given id."""
    taskset = ShellTaskset()
    for kind in KINDS:
        for number in range(TASKS_PER_KIND):
            task_id = f"{kind}-{number:04d}"
            load = load_of(task_id, seed, tail)
            task = taskset.load(task_id)
            if load.long and kind == "find":
                task = _lengthened(task, random.Random(f"long-tail/{seed}/{task_id}/words"))
            yield task.model_copy(update={"image": image_id, "setup": task.setup + _environment(load)})


def _lengthened(task: Task, rng: random.Random) -> Task:
    """The same question, whose answer is a dozen words."""
    line, answer = task.oracle_observations[0], task.oracle_answer
    more = " ".join(rng.sample(WORDS, LONG_WORDS - 1))
    return task.model_copy(
        update={
            "setup": task.setup.replace(f"{line}\\n", f"{line} {more}\\n"),
            "check": task.check.replace(f'"{answer}"', f'"{answer} {more}"'),
            "oracle_answer": f"{answer} {more}",
            "oracle_observations": [f"{line} {more}"],
        }
    )


def _environment(load: Load) -> str:
    lines = ["mkdir -p /data/.bench && chmod a+rx /data/.bench || exit 1\n"]
    lines.append(f"echo {load.pace_s} > /data/.bench/pace && chmod a+r /data/.bench/pace || exit 1\n")
    if load.busy:
        quoted = NOT_READY.replace("'", "'\\''")
        lines.append(f"echo {load.busy} > /data/.bench/busy && chmod a+r /data/.bench/busy || exit 1\n")
        lines.append(f"echo '{quoted}' > /data/.bench/not-ready && chmod a+r /data/.bench/not-ready || exit 1\n")
    return "".join(lines)


def write_folder(folder: Path, image_id: str, seed: int, tail: Tail = TAIL) -> Path:
    """The workload as a native folder of tasks; returns it."""
    train = folder / "train"
    train.mkdir(parents=True, exist_ok=True)
    for task in tasks(image_id, seed, tail):
        (train / f"{task.id}.json").write_text(task.model_dump_json(exclude={"id"}, exclude_defaults=True) + "\n")
    return folder


def paced_layer() -> Layer:
    """busybox as the tasks of `shell` have it, with a shell that waits where a task's environment says so."""
    buffer, data = io.BytesIO(), _SHELL.encode()
    with (
        tarfile.open(fileobj=io.BytesIO(busybox_layer().tar)) as base,
        tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for member in base.getmembers():
            if member.name != "bin/sh":
                tar.addfile(member, base.extractfile(member) if member.isreg() else None)
        entry = tarfile.TarInfo("bin/sh")
        entry.mode, entry.size = 0o755, len(data)
        tar.addfile(entry, io.BytesIO(data))
    return Layer("bench-paced", buffer.getvalue())
