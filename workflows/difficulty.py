"""Which tasks teach: the pass rate of a task, the pool that follows from it, and the draw of the next task.

Pure, and the same on every machine: what it returns follows from what it is given, in whichever order that comes.

A task's pass rate is that of its latest groups, as many as have `window` valid episodes together, and of one pass and
one failure imagined before them (a uniform prior; Laplace's rule of succession): (passes + 1) / (episodes + 2). What
older policies did fades as later groups take its place.

Draw n goes to the pool in whose part of the unit interval the n-th multiple of the golden ratio falls, shifted by the
seed; a pool's part is the weight of all its tasks together. Those multiples fill an interval as evenly as can be
(Knuth, The Art of Computer Programming 3, 6.4, theorem S): shares hold over few draws, and no pool waits for luck.
Within its pool the task comes next that was drawn longest ago; of those never drawn, the first in the run's order.

Called by the activity that draws, which keeps each draw as a row, and by the report.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

from workflows.config import SamplingConfig
from workflows.contracts import derive_seed

_CIRCLE = 2**31
_STRIDE = 1_327_217_885
"""The golden ratio's fraction, (sqrt(5) - 1) / 2, of the circle; odd, so that every place of it comes."""


class Difficulty(StrEnum):
    """The pool that a task is in."""

    UNSEEN = "unseen"
    """No valid episode yet."""
    UNSOLVABLE = "unsolvable"
    """Never solved, or next to never: probed rarely."""
    HARD = "hard"
    """Solved now and then."""
    LEARNING = "learning"
    SATURATED = "saturated"
    """Solved all but always: checked again rarely."""


TEACHING = (Difficulty.HARD, Difficulty.LEARNING)
"""Pools whose siblings differ often enough to train on."""


class Tally(NamedTuple):
    """Valid episodes, and those of them that passed."""

    passes: int = 0
    episodes: int = 0

    @property
    def pass_rate(self) -> float:
        """Above 0 and below 1, whatever was seen."""
        return (self.passes + 1) / (self.episodes + 2)


class Known(NamedTuple):
    """A task that was drawn before: what its latest groups make of it, and the number of its last draw."""

    tally: Tally
    last: int


def windowed(groups: Iterable[Tally], window: int) -> Tally:
    """The sum of the first groups, whole ones, until they have `window` episodes; `groups` are newest first."""
    passes = episodes = 0
    for group in groups:
        if episodes >= window:
            break
        passes, episodes = passes + group.passes, episodes + group.episodes
    return Tally(passes, episodes)


def difficulty_of(tally: Tally, rules: SamplingConfig) -> Difficulty:
    """The pool of a task with this tally."""
    if not tally.episodes:
        return Difficulty.UNSEEN
    rate = tally.pass_rate
    if rate < rules.unsolvable_below:
        return Difficulty.UNSOLVABLE
    if rate < rules.hard_below:
        return Difficulty.HARD
    return Difficulty.SATURATED if rate >= rules.saturated_from else Difficulty.LEARNING


class Sampler:
    """The tasks that may be drawn. `fresh`: those never drawn, in the run's order; `known`: the others.

    Each draw changes the order of the tasks and nothing else: as many samplers in a row, each made of what is known
    after the last one, draw what one of them draws."""

    def __init__(self, rules: SamplingConfig, seed: int, *, fresh: Iterable[str], known: Mapping[str, Known]) -> None:
        self._rules = rules
        self._shift = derive_seed(seed, "draws")
        self._difficulties = {task: difficulty_of(item.tally, rules) for task, item in known.items()}
        self._lanes: dict[Difficulty, deque[str]] = {name: deque() for name in Difficulty}
        unseen = self._lanes[Difficulty.UNSEEN]
        unseen.extend(fresh)
        self._tasks = Counter({Difficulty.UNSEEN: len(unseen)}) + Counter(self._difficulties.values())
        for task in sorted(known, key=lambda task: (known[task].last, task)):
            lane = self._difficulties[task] if rules.by == "difficulty" else Difficulty.UNSEEN
            self._lanes[lane].append(task)

    @property
    def tasks(self) -> dict[str, int]:
        """Tasks by pool."""
        return {name.value: self._tasks[name] for name in Difficulty}

    @property
    def shares(self) -> dict[str, float]:
        """Of the next draws, by pool; they add up to 1 where there is a task. In order: as large as the pools."""
        total = sum(self._weights) or 1.0
        if self._rules.by != "difficulty":
            return {name: count / total for name, count in self.tasks.items()}
        return {name.value: weight / total for name, weight in zip(Difficulty, self._weights, strict=True)}

    @property
    def _weights(self) -> list[float]:
        return [self._weight(name) * len(lane) for name, lane in self._lanes.items()]

    def _weight(self, name: Difficulty) -> float:
        return self._rules.weight_of(name) if self._rules.by == "difficulty" else 1.0

    def draw(self, number: int) -> tuple[str, Difficulty] | None:
        """The task of draw `number` and its pool; None where there is no task."""
        lane = self._lane(number)
        if lane is None:
            return None
        task = lane.popleft()
        lane.append(task)
        return task, self._difficulties.get(task, Difficulty.UNSEEN)

    def _lane(self, number: int) -> deque[str] | None:
        weights = self._weights
        at = (self._shift + number * _STRIDE) % _CIRCLE / _CIRCLE * sum(weights)
        found = None
        for weight, lane in zip(weights, self._lanes.values(), strict=True):
            if lane:
                found = lane
                if at < weight:
                    break
            at -= weight
        return found
