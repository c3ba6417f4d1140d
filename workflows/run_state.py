"""The state of a TrainingRun that crosses continue-as-new, and what follows from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from workflows.config import RunConfig
from workflows.contracts import (
    BatchWait,
    GroupResult,
    OpenRunOutput,
    QuarantineOrder,
    Queue,
    RolloutLimits,
    RunState,
    RunStatus,
)
from workflows.quarantine import Quarantine
from workflows.ready_pool import PoolRules, ReadyPool
from workflows.task_changes import TaskChanges

MAX_EMPTY_BATCHES = 3
"""Batches in a row without an eligible group, or that taught nothing, after which the run ends."""
Say = Callable[[str], None]
"""Tells whoever asks what the run is doing."""
QUARANTINED = "quarantined"
"""Reason of groups whose rewards an operator marked as wrong."""
SHOWN = 5
"""Quarantined tasks that the UI names."""


class Carry(BaseModel):
    """All of it; a few KB. `config` has been validated and its `model` made a folder."""

    config: RunConfig
    opened: OpenRunOutput
    pool: ReadyPool = ReadyPool()
    step: int = 0
    policy_version: int = 0
    checkpoint: str = ""
    manifest: str = ""
    publish_s: float = 0.0
    """What publishing it took."""
    task_cursor: int = 0
    """Position in the order of tasks, or the number of the next draw."""
    tasks_by_difficulty: dict[str, int] = {}
    """At the last draw."""
    task_changes: TaskChanges = TaskChanges()
    paused: bool = False
    outcomes: dict[str, int] = {}
    reward: float | None = None
    wait: BatchWait | None = None
    """What the last batch's time to a trainable batch was made of."""
    batch_opened_at: float = 0.0
    """Since when the next batch is collected; 0 while nothing may be admitted for it."""
    evaluation_first: float | None = None
    evaluation_last: float | None = None
    evaluated_version: int | None = None
    steps_in_history: int = 0
    empty_batches: int = 0
    void_batches: int = 0
    """Batches in a row that taught nothing; all are tries at the present step."""
    quarantine: Quarantine = Quarantine()
    short_groups: int = 0
    short_share: float | None = None
    off_policy_steps: int | None = None
    """async: the lag that admission allows for now, where it follows the divergence."""
    warning: str = ""
    late_engines: list[str] = []
    """Those that did not serve the last version in time."""
    row_state: RunState = RunState.RUNNING
    """The state that the run's row has."""

    @property
    def draws_tasks(self) -> bool:
        """Whether the next task follows from rows: not from the seed and the taskset alone."""
        return self.config.sampling.by == "difficulty" or self.task_changes.any

    def config_json(self) -> dict[str, Any]:
        """The configuration as messages carry it."""
        return self.config.model_dump(mode="json")

    @property
    def limits(self) -> RolloutLimits:
        """What one episode may use, and where it asks for its sandbox."""
        sandboxes = Queue.SANDBOXES if self.opened.sandbox_hosts else ""
        return self.config.limits().model_copy(update={"sandboxes": sandboxes})

    @property
    def rules(self) -> PoolRules:
        rollout, sync = self.config.rollout, self.config.mode == "sync"
        oversampled = sync and rollout.oversample > 1
        return PoolRules(
            groups_per_batch=rollout.groups_per_batch,
            capacity=self.config.capacity_at(self.lag),
            refill_limit=int(round(rollout.refill * rollout.groups_per_batch, 6)),
            max_episodes=self.config.max_concurrent_episodes,
            max_off_policy_steps=0 if sync else rollout.max_off_policy_steps,
            waves=sync and not oversampled,
            policy=rollout.pool_policy,
            cancel_surplus=oversampled,
            group_size=rollout.group_size,
            siblings=rollout.siblings,
            replay_share=self.config.training.replay_share,
        )

    @property
    def lag(self) -> int:
        """async: versions that admission lets a batch lag now."""
        rollout = self.config.rollout
        least = rollout.min_off_policy_steps
        if least is None:
            return rollout.max_off_policy_steps
        return least if self.off_policy_steps is None else self.off_policy_steps

    def adapt(self, divergence: float | None) -> None:
        """After an update: one version more while its batch was near today's policy, half as many when it was far.

        `divergence`: the batch's mean, in nats; near and far are an eighth and a half of training.max_divergence."""
        rollout, limit = self.config.rollout, self.config.training.max_divergence
        if rollout.min_off_policy_steps is None or divergence is None or self.config.mode == "sync":
            return
        if divergence > limit / 2:
            self.off_policy_steps = max(rollout.min_off_policy_steps, self.lag // 2)
        elif divergence < limit / 8:
            self.off_policy_steps = min(rollout.max_off_policy_steps, self.lag + 1)

    @property
    def wants_groups(self) -> bool:
        """Whether a batch is still to be collected: not once the last one is cut, unless it taught nothing."""
        return self.step + bool(self.pool.reserved) < self.config.training.steps

    def close(self, result: GroupResult, now: float) -> bool:
        """Take a closed group in. False for a report that was taken before."""
        surplus = result.number in self.pool.surplus
        if not self.pool.close(result):
            return False
        if result.task_id in self.quarantine.marked:
            self.pool.drop(QUARANTINED, [result.number])
        self.pool.turn_away(self.rules)
        self.pool.mark(self.rules, now)
        self.outcomes = dict(Counter(self.outcomes) + Counter(result.outcomes))
        if surplus:
            return True
        self.short_groups += result.short
        self.quarantine.note(result, after=self.config.rollout.quarantine_after)
        return True

    def heed(self, order: QuarantineOrder, now: float) -> None:
        """Take an operator's word in: what may train no more leaves the pool. A batch that is cut stays as it is."""
        self.quarantine.heed(order)
        self.pool.drop(QUARANTINED, order.groups)
        self.pool.mark(self.rules, now)

    def drop_stale(self, now: float) -> None:
        self.pool.drop_stale(self.rules, self.policy_version)
        self.pool.mark(self.rules, now)

    def trained(self, now: float) -> None:
        """The batch's slots are free: where nothing was admitted meanwhile, the next is collected from here."""
        self.pool.trained()
        self.batch_opened_at = self.batch_opened_at or now

    def another_round(self) -> str:
        """Admit another batch's worth of groups where none could train; after too many of those, why the run ends."""
        self.empty_batches += 1
        self.pool.another_round()
        if self.empty_batches < MAX_EMPTY_BATCHES:
            return ""
        dropped = self.pool.dropped
        silent = "no_signal" in dropped and max(dropped, key=lambda reason: dropped[reason]) == "no_signal"
        return (
            f"no group of the last {self.empty_batches} x {self.rules.refill_limit} could train"
            f" (dropped in all: {dropped})" + (": the taskset has nothing left to teach this policy" if silent else "")
        )

    def why_degraded(self) -> str:
        return (
            f"the last {self.pool.without_valid} groups closed without a valid sibling, or with too few to train:"
            f" admission is held and one group at a time probes; endings so far: {self.outcomes}"
        )

    def status(self, run: str, state: RunState, reason: str, doing: str) -> RunStatus:
        return RunStatus(
            run=run,
            state=state,
            reason=reason,
            step=self.step,
            steps=self.config.training.steps,
            policy_version=self.policy_version,
            reward=self.reward,
            time_to_trainable_batch_s=self.wait.seconds if self.wait else None,
            wait=self.wait,
            outcomes=self.outcomes,
            groups_in_flight=len(self.pool.in_flight),
            groups_ready=len(self.pool.ready),
            groups_dropped=self.pool.dropped,
            quarantined=self.quarantine.shown,
            tasks_by_difficulty=self.tasks_by_difficulty,
            tasks_added=self.task_changes.added,
            tasks_retired=self.task_changes.retired,
            task_changes=self.task_changes.latest,
            short_groups=self.short_groups,
            short_share=self.short_share,
            evaluation_first=self.evaluation_first,
            evaluation_last=self.evaluation_last,
            off_policy_steps=None if self.config.mode == "sync" else self.lag,
            warning=self.warning,
            doing=doing,
        )


def starting_status(run: str, state: RunState, reason: str, doing: str) -> RunStatus:
    """Status of a run whose configuration has not been accepted yet."""
    return RunStatus(
        run=run,
        state=state,
        reason=reason,
        step=0,
        steps=0,
        policy_version=0,
        reward=None,
        time_to_trainable_batch_s=None,
        outcomes={},
        groups_in_flight=0,
        groups_ready=0,
        groups_dropped={},
        doing=doing,
    )


def progress_markdown(status: RunStatus) -> str:
    """A run's progress as its current details in the Temporal UI show it."""

    def number(value: float | None, form: str = ".3f") -> str:
        return "-" if value is None else format(value, form)

    rows = [
        ("state", f"{status.state}{': ' + status.reason if status.reason else ''}"),
        ("doing", status.doing),
        *([("warning", status.warning)] if status.warning else []),
        ("step", f"{status.step} of {status.steps}"),
        ("policy_version", str(status.policy_version)),
        ("reward of the last batch", number(status.reward)),
        ("held-out reward", f"first {number(status.evaluation_first)}, last {number(status.evaluation_last)}"),
        ("time to trainable batch", f"{number(status.time_to_trainable_batch_s, '.1f')} s"),
        ("of which on average", wait_words(status.wait) or "-"),
        ("its last 5 %", f"{status.wait.tail_s:.1f} s, {status.wait.tail_attempt}" if status.wait else "-"),
        (
            "groups",
            f"{status.groups_in_flight} in flight, {status.groups_ready} ready, dropped {status.groups_dropped}",
        ),
        ("short groups", f"{status.short_groups} closed, {number(status.short_share, '.0%')} of the last batch"),
        ("quarantine", quarantined_words(status.quarantined)),
        *_task_rows(status),
        ("outcomes", ", ".join(f"{name} {count}" for name, count in sorted(status.outcomes.items())) or "none yet"),
    ]
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])


def _task_rows(status: RunStatus) -> list[tuple[str, str]]:
    """What follows from draws and from an operator's changes; none of it in a run that knows neither."""
    pools = ", ".join(f"{count} {name}" for name, count in status.tasks_by_difficulty.items())
    changed = f"{status.tasks_added} added, {status.tasks_retired} retired"
    latest = "; ".join(status.task_changes[-SHOWN:])
    return [
        *([("tasks", pools)] if pools else []),
        *([("tasks changed", f"{changed}: {latest}")] if latest else []),
    ]


def wait_words(wait: BatchWait | None) -> str:
    """The parts of a batch's wait that a person would see, the longest first."""
    parts = sorted((wait.parts if wait else {}).items(), key=lambda item: -item[1])
    return ", ".join(f"{name.replace('_', ' ')} {seconds:.1f} s" for name, seconds in parts if seconds >= 0.05)


def quarantined_words(tasks: dict[str, str]) -> str:
    """The first tasks in quarantine with their reasons, and how many more there are."""
    first = "; ".join(f"{task_id} ({why})" for task_id, why in list(tasks.items())[:SHOWN])
    more = f" and {len(tasks) - SHOWN} more" if len(tasks) > SHOWN else ""
    return first + more or "none"
