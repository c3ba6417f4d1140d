"""The state of a TrainingRun that crosses continue-as-new, and what follows from it."""

from __future__ import annotations

from pydantic import BaseModel

from workflows.config import RunConfig
from workflows.contracts import OpenRunOutput, RunState, RunStatus
from workflows.ready_pool import PoolRules, ReadyPool


class Carry(BaseModel):
    """All of it; a few KB. `config` has been validated and its `model` made a folder."""

    config: RunConfig
    opened: OpenRunOutput
    pool: ReadyPool = ReadyPool()
    step: int = 0
    policy_version: int = 0
    checkpoint: str = ""
    manifest: str = ""
    task_cursor: int = 0
    paused: bool = False
    outcomes: dict[str, int] = {}
    reward: float | None = None
    collected_s: float | None = None
    batch_opened_at: float = 0.0
    evaluation_first: float | None = None
    evaluation_last: float | None = None
    evaluated_version: int | None = None
    steps_in_history: int = 0
    empty_batches: int = 0

    @property
    def rules(self) -> PoolRules:
        rollout = self.config.rollout
        return PoolRules(
            groups_per_batch=rollout.groups_per_batch,
            capacity=self.config.capacity,
            refill_limit=int(rollout.refill * rollout.groups_per_batch),
            max_in_flight=max(1, self.config.max_concurrent_episodes // rollout.group_size),
            max_off_policy_steps=rollout.max_off_policy_steps if self.config.mode == "async" else 0,
            waves=self.config.mode == "sync",
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
            time_to_trainable_batch_s=self.collected_s,
            outcomes=self.outcomes,
            groups_in_flight=len(self.pool.in_flight),
            groups_ready=len(self.pool.ready),
            groups_dropped=self.pool.dropped,
            evaluation_first=self.evaluation_first,
            evaluation_last=self.evaluation_last,
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
        ("step", f"{status.step} of {status.steps}"),
        ("policy_version", str(status.policy_version)),
        ("reward of the last batch", number(status.reward)),
        ("held-out reward", f"first {number(status.evaluation_first)}, last {number(status.evaluation_last)}"),
        ("time to trainable batch", f"{number(status.time_to_trainable_batch_s, '.1f')} s"),
        (
            "groups",
            f"{status.groups_in_flight} in flight, {status.groups_ready} ready, dropped {status.groups_dropped}",
        ),
        ("outcomes", ", ".join(f"{name} {count}" for name, count in sorted(status.outcomes.items())) or "none yet"),
    ]
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])
