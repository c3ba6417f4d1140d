"""Messages between TrainingRun and the control activities, and what it shows of itself."""

from __future__ import annotations

from typing import NamedTuple

from workflows.contracts.base import Message, TaskRef
from workflows.contracts.training import EngineInfo
from workflows.contracts.words import RunState, Split


class OpenRunInput(Message):
    """Check what the workflow can't see (folders, tasksets, the run to resume from) and write the run's row."""

    run: str
    config: dict[str, object]
    execution: str = ""
    """The workflow's first execution: tells a retry from a second run under the same id."""


class OpenRunOutput(Message):
    model: str
    """The model's folder, absolute."""
    train_tasks: int
    held_out_tasks: int
    engines: list[EngineInfo]
    resume_checkpoint: str = ""
    """Manifest key of the training state to start from; empty for a fresh start."""
    sandbox_hosts: list[str] = []
    """Hosts that sandboxes live on; none: they live where the episodes' worker is."""


class PickTasksInput(Message):
    """`count` tasks of a split from position `cursor` of its order for `seed` (an endless, reshuffled cycle)."""

    taskset: str
    split: Split
    seed: int
    cursor: int
    count: int


class PickTasksOutput(Message):
    tasks: list[TaskRef]


class ClosedGroupsInput(Message):
    group_ids: list[str]


class ClosedGroupsOutput(Message):
    closed: list[str]
    """Those of `group_ids` whose workflow does not run any more."""


class PooledGroup(NamedTuple):
    """An eligible group as a run keeps it until it trains: its members are read from rows, so that a full pool and a
    batch stay far below the limit on messages."""

    number: int
    min_version: int | None
    first_sibling_at: float
    closed_at: float
    short: bool
    replayed: bool = False
    """An archived success trains with it."""


class ReserveBatchInput(Message):
    run: str
    step: int
    """The optimizer step that this batch makes; the first is 1."""
    policy_version: int
    """Version of the weights that the step starts from."""
    groups: list[PooledGroup]
    opened_at: float = 0.0
    """When the batch began to be collected: the previous one was cut, or admission opened if that was later."""
    complete_at: float = 0.0
    """When an eligible batch was complete; the cut may come later, when the trainer is free."""
    dropped: dict[str, list[int]] = {}
    """By reason, numbers of groups that had closed eligible and will train no more, since the last reservation."""
    tries: int = 0
    """Batches for this step that taught nothing."""

    @property
    def batch_id(self) -> str:
        return f"{self.run}/b{self.step}" + (f".{self.tries}" if self.tries else "")


class BatchWait(Message):
    """`time/to_trainable_batch` of one batch and what it was made of; storage/waiting.py defines the split."""

    seconds: float
    parts: dict[str, float] = {}
    """Means over the batch's episodes; they add up to `seconds`."""
    median_s: float = 0.0
    """After so many seconds half of its episodes had ended."""
    tail_s: float = 0.0
    """Seconds for which the last 5 % of its episodes (at least one) kept it waiting."""
    tail_group: str = ""
    """The group that closed last."""
    tail_attempt: str = ""
    """The attempt of that group which ended last."""
    tail_parts: dict[str, float] = {}
    """That attempt's own way through the wait; adds up to `seconds`."""


class ReserveBatchOutput(Message):
    batch_id: str
    episodes: int
    reward: float = 0.0
    """Mean reward of its episodes."""
    wait: BatchWait | None = None
    dropped: dict[str, int] = {}
    """By reason, groups that were asked for and train no more."""
    void: str = ""
    """Why nothing was reserved: the batch is used up and makes no step."""


class QuarantineInput(Message):
    """A task that the run admits no more."""

    run: str
    task: TaskRef
    why: str
    since: float


class QuarantineOrder(Message):
    """An operator's word on rewards that were wrong, to a run that goes on: the signal `quarantine`. May come twice."""

    tasks: dict[str, str] = {}
    """Tasks that are admitted no more, by id, and why in a few words."""
    released: list[str] = []
    """Tasks that may be admitted again."""
    groups: list[int] = []
    """Numbers of closed groups that train no more."""


class CloseRunInput(Message):
    run: str
    state: RunState
    reason: str = ""
    step: int | None = None
    """The last step that was made durable; None for a run that never opened."""
    policy_version: int | None = None


class RunProgress(Message):
    """What `record_progress` writes into the run's row."""

    run: str
    state: RunState
    step: int
    policy_version: int
    reason: str = ""


class RunStatus(Message):
    """Answer of the `status` query."""

    run: str
    state: RunState
    reason: str = ""
    step: int
    steps: int
    policy_version: int
    reward: float | None
    """Mean reward of the last batch."""
    time_to_trainable_batch_s: float | None
    wait: BatchWait | None = None
    """What the last batch's time to a trainable batch was made of."""
    outcomes: dict[str, int]
    groups_in_flight: int
    groups_ready: int
    groups_dropped: dict[str, int]
    quarantined: dict[str, str] = {}
    """Tasks that are not admitted any more, and why."""
    tasks_by_difficulty: dict[str, int] = {}
    """Tasks that may be drawn, as they stood at the last draw; empty where the run takes its tasks in order."""
    tasks_added: int = 0
    """By operators, while it ran; `tasks_retired` are those that they took out."""
    tasks_retired: int = 0
    task_changes: list[str] = []
    """The latest of them, as `added fix-pip`, the newest last."""
    short_groups: int = 0
    """Groups that closed with fewer valid siblings than `group_size`."""
    short_share: float | None = None
    """Their share of the last batch."""
    evaluation_first: float | None = None
    evaluation_last: float | None = None
    off_policy_steps: int | None = None
    """async: versions that admission lets a batch lag now."""
    warning: str = ""
    """Of the last update."""
    doing: str = ""
    """What the run waits for now, in words."""
