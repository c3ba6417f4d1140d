"""The ready pool: complete groups that wait for the trainer, and the rules of what may train.

Pure rules over a small state that crosses continue-as-new inside the run's. Called by TrainingRun only.

Admission is bounded by what the trainer will consume: the groups admitted and not dropped may exceed the groups
trained by `capacity` at most. It is bounded by the episodes in flight, too: a group whose last siblings are slow holds
their places and no others. In sync mode groups are admitted in waves, each after the last has closed, so that the
batch does not depend on the order in which groups finish; with `oversample` there are no waves: groups are admitted as
slots free, a batch is cut as soon as enough are complete, and what is left then is surplus.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from pydantic import BaseModel, ConfigDict

from workflows.contracts import GroupResult, PooledGroup, PoolPolicy

GROUPS_TO_DEGRADE = 4
"""Groups in a row that broke, or lost too many siblings to train, that hold admission."""
NO_EVIDENCE = ("cancelled", "lost", "surplus")
"""Reasons of groups that an operator or we ended: they say nothing of the infrastructure."""


class PoolRules(BaseModel):
    """What bounds the pool. `refill_limit`: groups that may close for a batch before it is cut with what there is."""

    model_config = ConfigDict(frozen=True)

    groups_per_batch: int
    capacity: int
    refill_limit: int
    max_episodes: int
    max_off_policy_steps: int
    waves: bool
    policy: PoolPolicy = PoolPolicy.OLDEST_FIRST
    cancel_surplus: bool = False
    """What is not in a batch when it is cut trains no more."""
    group_size: int = 1
    siblings: int = 1
    """Of a group as it starts, spare ones too."""
    replay_share: float = 0.0
    """Largest share of a batch's episodes that may be archived successes."""

    def replays(self, groups: int) -> int:
        """How many archived successes a batch of so many groups may hold, one to a group."""
        most = self.replay_share * groups * self.group_size / (1 - self.replay_share)
        return int(round(most, 6))


class ReadyPool(BaseModel):
    """Groups by number; numbers are never used twice."""

    next_number: int = 0
    in_flight: list[int] = []
    left: dict[int, int] = {}
    """Of groups in flight that told: siblings that still go. Of the others all do."""
    wave: int = 0
    """sync mode: groups of the present wave that have not started."""
    ready: list[PooledGroup] = []
    surplus: list[int] = []
    """Those of `in_flight` that were asked to end, since a batch was cut without them."""
    reserved: int = 0
    """Groups of the batch that is being trained; their slots free when its weights are applied."""
    dropped: dict[str, int] = {}
    untold: dict[str, list[int]] = {}
    """By reason, groups that closed eligible and were dropped since: their rows are told with the next batch."""
    complete_at: float = 0.0
    """Since when a batch is complete; 0 while none is."""
    admitted_for_batch: int = 0
    closed_for_batch: int = 0
    cut_after: int = 0
    """Once so many groups have closed as may: those below this number had begun by then. in_order waits for them."""
    without_valid: int = 0
    """Groups in a row that closed without a valid sibling, or too short to train."""

    @property
    def degraded(self) -> bool:
        return self.without_valid >= GROUPS_TO_DEGRADE

    def admissible(self, rules: PoolRules, *, at_most: int | None = None) -> int:
        """How many groups may start now."""
        going = sum(self.left.get(number, rules.siblings) for number in self.in_flight)
        slots = (rules.max_episodes - going) // rules.siblings
        if at_most is not None:
            slots = min(slots, at_most - len(self.in_flight))
        return max(0, min(slots, self.wanted(rules)))

    def wanted(self, rules: PoolRules) -> int:
        """Groups that the trainer will have use for, beside those that there are; sync mode: the rest of the wave."""
        if self.wave:
            return self.wave
        if rules.waves and self.in_flight:
            return 0
        if self.reserved and not rules.max_off_policy_steps:
            return 0  # Its weights would be old before it could train.
        room = rules.capacity - len(self.in_flight) - len(self.ready) - self.reserved
        return min(room, rules.refill_limit - self.admitted_for_batch) if rules.waves else room

    def admit(self, rules: PoolRules) -> int:
        """The number of the next group."""
        if rules.waves:
            self.wave = self.wanted(rules) - 1
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
        self.left.pop(result.number, None)
        if result.number in self.surplus:
            self.surplus.remove(result.number)
            self._drop("surplus", *([result.number] if result.eligible else []))
            return True
        self._count(result)
        if result.eligible:
            times = (result.first_sibling_at, result.closed_at)
            self.ready.append(PooledGroup(result.number, result.min_version, *times, result.short, bool(result.replay)))
            self.ready.sort(key=lambda group: group.number)
        else:
            self._drop(result.reason)
        return True

    def siblings_left(self, number: int, left: int) -> None:
        """So many siblings of a group still go. Signals may come late, twice, and in another order."""
        if number in self.in_flight:
            self.left[number] = min(left, self.left.get(number, left))

    def _count(self, result: GroupResult) -> None:
        """A group that infrastructure left without enough siblings is no attempt at a batch: an outage, also of a part,
        is bounded by holding admission, not by the groups that may close for a batch, so that the run outlasts it."""
        if result.eligible or (result.members and not result.short):
            self.closed_for_batch += 1
            self.without_valid = 0
            return
        self.admitted_for_batch = max(0, self.admitted_for_batch - 1)
        if result.reason not in NO_EVIDENCE:
            self.without_valid += 1

    def turn_away(self, rules: PoolRules) -> None:
        """Groups that only an archived success would let train, beyond what a full batch may hold of them: they would
        take the room of others."""
        joined = [group.number for group in self.ready if group.replayed]
        self.drop("no_signal", joined[rules.replays(rules.groups_per_batch) :])

    def drop_stale(self, rules: PoolRules, version: int) -> None:
        """Hold out groups whose oldest token is more than `max_off_policy_steps` versions behind the trainer."""
        fresh = []
        for group in self.ready:
            if group.min_version is not None and version - group.min_version > rules.max_off_policy_steps:
                self._drop("too_stale", group.number)
            else:
                fresh.append(group)
        self.ready = fresh

    def next_batch(self, rules: PoolRules) -> list[PooledGroup]:
        """What `cut` would take now, in the policy's order."""
        return self._next(rules)[: rules.groups_per_batch]

    def drop(self, reason: str, numbers: Collection[int]) -> None:
        """Hold out groups that are ready."""
        for group in self.ready:
            if group.number in numbers:
                self._drop(reason, group.number)
        self.ready = [group for group in self.ready if group.number not in numbers]

    def batch_is_ready(self, rules: PoolRules) -> bool:
        """A full batch; or what there is, once so many groups have closed for it as may."""
        if rules.waves and (self.in_flight or self.wave):
            return False
        count = len(self._next(rules))
        return count >= rules.groups_per_batch or (count > 0 and self.spent(rules))

    def _next(self, rules: PoolRules) -> list[PooledGroup]:
        """What a batch may take now, in the policy's order: of the groups that an archived success has joined no more
        than the share allows, the others wait."""
        found = self._in_order(rules)
        taken = min(len(found), rules.groups_per_batch)
        while sum(group.replayed for group in found) > (most := rules.replays(taken)):
            late = {group.number for group in [group for group in found if group.replayed][most:]}
            found = [group for group in found if group.number not in late]
            taken = min(len(found), rules.groups_per_batch)
        return found

    def _in_order(self, rules: PoolRules) -> list[PooledGroup]:
        match rules.policy:
            case PoolPolicy.OLDEST_FIRST:
                return self.ready
            case PoolPolicy.READY_FIRST:
                return sorted(self.ready, key=lambda group: (group.closed_at, group.number))
            case PoolPolicy.IN_ORDER:
                before = min(self.live, default=self.next_number)
                return [group for group in self.ready if group.number < before]

    @property
    def live(self) -> list[int]:
        """Groups in flight that may still train."""
        return [number for number in self.in_flight if number not in self.surplus]

    def collects(self, rules: PoolRules) -> bool:
        """Whether the next batch is in the making: something is in flight, waits, or may start now."""
        return bool(self.live or self.ready) or self.wanted(rules) > 0

    def mark(self, rules: PoolRules, now: float) -> None:
        """Note since when a batch is complete; to be called after every change."""
        if self.closed_for_batch >= rules.refill_limit:
            self.cut_after = self.cut_after or self.next_number
        self.complete_at = (self.complete_at or now) if self.batch_is_ready(rules) else 0.0

    def spent(self, rules: PoolRules) -> bool:
        """So many groups have closed for this batch as may, and in order those that had begun by then, too."""
        if self.closed_for_batch < rules.refill_limit or (rules.waves and self.in_flight):
            return False
        waited_for = self.cut_after or self.next_number
        return rules.policy is not PoolPolicy.IN_ORDER or min(self.live, default=waited_for) >= waited_for

    def give_up(self, rules: PoolRules) -> bool:
        """Whether so many groups have closed for the batch as may, and none can train. Those that only an archived
        success would let train go too: where there are no others they are beyond its share, and nothing else would end
        their wait."""
        if not self.spent(rules) or not all(group.replayed for group in self.ready):
            return False
        self.drop("no_signal", [group.number for group in self.ready])
        return True

    def another_round(self) -> None:
        """As many groups again may close for the batch."""
        self.admitted_for_batch = self.closed_for_batch = self.cut_after = 0

    def cut(self, rules: PoolRules) -> list[PooledGroup]:
        """The groups that the policy takes, by number, at most a batch of them. `trained` frees their slots.

        Where the surplus is cancelled, `surplus` then names the groups that must be told to end."""
        batch = sorted(self.next_batch(rules), key=lambda group: group.number)
        taken = {group.number for group in batch}
        self.ready = [group for group in self.ready if group.number not in taken]
        if rules.cancel_surplus:
            self.surplus = list(self.in_flight)
            for group in self.ready:
                self._drop("surplus", group.number)
            self.ready = []
        self.admitted_for_batch = self.closed_for_batch = len(self.ready)
        self.reserved = len(batch)
        self.complete_at, self.cut_after = 0.0, 0
        return batch

    def take_untold(self) -> dict[str, list[int]]:
        told, self.untold = self.untold, {}
        return told

    def trained(self) -> None:
        self.reserved = 0

    def left_out(self, counts: dict[str, int]) -> None:
        """Groups of the batch that trained nothing, by reason."""
        self.dropped = dict(Counter(self.dropped) + Counter(counts))

    def _drop(self, reason: str, *eligible: int) -> None:
        """Count a dropped group. `eligible`: its number, where its row says that it may train."""
        self.left_out({reason.partition(":")[0]: 1})
        if eligible:
            self.untold = self.untold | {reason: [*self.untold.get(reason, []), *eligible]}
