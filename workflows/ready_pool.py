"""The ready pool: complete groups that wait for the trainer, and the rules of what may train.

Pure rules over a small state that crosses continue-as-new inside the run's. Called by TrainingRun only.

Admission is bounded by what the trainer will consume: the groups admitted and not dropped may exceed the groups
trained by `capacity` at most. In sync mode groups are admitted in waves, each after the last has closed, so that the
batch does not depend on the order in which groups finish.
"""

from __future__ import annotations

from collections import Counter

from pydantic import BaseModel, ConfigDict

from workflows.contracts import GroupResult


class PoolRules(BaseModel):
    """What bounds the pool. `refill_limit`: groups that may close for a batch before it is cut with what there is."""

    model_config = ConfigDict(frozen=True)

    groups_per_batch: int
    capacity: int
    refill_limit: int
    max_in_flight: int
    max_off_policy_steps: int
    waves: bool


class ReadyPool(BaseModel):
    """Groups by number; numbers are never used twice."""

    next_number: int = 0
    in_flight: list[int] = []
    wave: int = 0
    """sync mode: groups of the present wave that have not started."""
    ready: list[GroupResult] = []
    reserved: int = 0
    """Groups of the batch that is being trained; their slots free when its weights are applied."""
    dropped: dict[str, int] = {}
    admitted_for_batch: int = 0
    closed_for_batch: int = 0
    without_valid: int = 0
    """Groups in a row that closed without a valid sibling."""

    def admissible(self, rules: PoolRules, *, at_most: int | None = None) -> int:
        """How many groups may start now."""
        slots = rules.max_in_flight - len(self.in_flight)
        if at_most is not None:
            slots = min(slots, at_most - len(self.in_flight))
        return max(0, min(slots, self._wanted(rules)))

    def _wanted(self, rules: PoolRules) -> int:
        if self.wave:
            return self.wave
        if rules.waves and self.in_flight:
            return 0
        room = rules.capacity - len(self.in_flight) - len(self.ready) - self.reserved
        return min(room, rules.refill_limit - self.admitted_for_batch) if rules.waves else room

    def admit(self, rules: PoolRules) -> int:
        """The number of the next group."""
        if rules.waves:
            self.wave = self._wanted(rules) - 1
        number = self.next_number
        self.next_number += 1
        self.in_flight.append(number)
        self.admitted_for_batch += 1
        return number

    def close(self, result: GroupResult) -> bool:
        """Take a closed group in. False for a report that was taken before: signals may come twice."""
        if result.number not in self.in_flight:
            return False
        self.in_flight.remove(result.number)
        self.closed_for_batch += 1
        self.without_valid = 0 if result.members else self.without_valid + 1
        if result.eligible:
            self.ready.append(result)
            self.ready.sort(key=lambda group: group.number)
        else:
            self._drop(result.reason)
        return True

    def drop_stale(self, rules: PoolRules, version: int) -> None:
        """Hold out groups whose oldest token is more than `max_off_policy_steps` versions behind the trainer."""
        fresh = []
        for group in self.ready:
            if group.min_version is not None and version - group.min_version > rules.max_off_policy_steps:
                self._drop("too_stale")
            else:
                fresh.append(group)
        self.ready = fresh

    def batch_is_ready(self, rules: PoolRules) -> bool:
        """A full batch; or what there is, once so many groups have closed for it as may."""
        if rules.waves and (self.in_flight or self.wave):
            return False
        return len(self.ready) >= rules.groups_per_batch or (bool(self.ready) and self.spent(rules))

    def spent(self, rules: PoolRules) -> bool:
        """So many groups have closed for this batch as may."""
        return self.closed_for_batch >= rules.refill_limit and not (rules.waves and self.in_flight)

    def another_round(self) -> None:
        """As many groups again may close for the batch."""
        self.admitted_for_batch = self.closed_for_batch = 0

    def cut(self, rules: PoolRules) -> list[GroupResult]:
        """The oldest eligible groups, at most a batch of them. `trained` frees their slots."""
        batch, self.ready = self.ready[: rules.groups_per_batch], self.ready[rules.groups_per_batch :]
        self.admitted_for_batch = self.closed_for_batch = len(self.ready)
        self.reserved = len(batch)
        return batch

    def trained(self) -> None:
        self.reserved = 0

    def _drop(self, reason: str) -> None:
        self.dropped = dict(Counter(self.dropped) + Counter({reason: 1}))
