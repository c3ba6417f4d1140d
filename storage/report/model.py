"""What a report holds: the fields of `ratchet report --json`, which are for machines to rely on.

Seconds, bytes and shares (0 to 1) everywhere; None where there is nothing to say yet, never a made-up zero.
"""

from __future__ import annotations

from storage.report.evaluation_parts import MeasuredPart
from storage.report.parts import IncidentPart, Part, QuestionPart
from storage.report.rewards import RewardsPart
from storage.report.taskset import TasksetPart
from storage.report.weight_parts import PolicyAgePart, PublicationPart, SpanningPart, WeightTroublePart

TIME_PARTS = ("queue", "boot", "generate", "act", "verify", "other", "wait_for_siblings", "wait_for_batch")
"""Parts of the time to a trainable batch, as storage/waiting.py defines them."""


class EvaluationPoint(Part):
    """Held-out tasks under one version."""

    version: int
    mean_reward: float
    episodes: int
    excluded: int
    by_kind: dict[str, float]


class EvaluationPart(Part):
    """`first` and `last` are mean held-out rewards of the run's own evaluations; `last` is None until there are two."""

    first: float | None
    last: float | None
    versions: list[EvaluationPoint]
    measured: list[MeasuredPart]
    """All evaluations with a serving fingerprint, the earliest first, those that somebody asked for among them."""
    apart: list[str]
    """Sentences on engines that serve the run otherwise than others do."""
    again: str
    """The command that makes another evaluation of the newest version."""


class TailPart(Part):
    """Who completed a batch: the group that closed last, and its attempt that ended last with its way through the wait,
    whose parts add up to the wait."""

    group: str
    attempt: str
    seconds: float
    """For which the last 5 % of the batch's episodes kept it waiting."""
    parts: dict[str, float]


class StepPart(Part):
    """One update. `time` has `to_trainable_batch` in seconds, its parts (means over the batch's episodes, which add up
    to it), `median` (until half of the episodes had ended) and `tail` (from when 95 % had ended). `metrics` are the
    trainer's, `finish_order/*`, and `weight_sync/policy_age` and `_max` of the requests whose answers trained."""

    step: int
    state: str
    policy_version: int
    episodes: int
    groups: int
    reward: float
    time: dict[str, float]
    tail: TailPart | None
    metrics: dict[str, float | None]


class VersionPart(Part):
    """All valid training episodes that ended under a version, also those whose groups had no signal."""

    version: int
    episodes: int
    mean_reward: float


class KindPart(Part):
    """Training attempts on one kind of task; EvaluationPoint.by_kind has the held-out ones."""

    kind: str
    episodes: int
    valid: int
    mean_reward: float | None


class BucketPart(Part):
    """Training attempts that ended between two moments, in seconds since the run's start."""

    from_s: float
    to_s: float
    outcomes: dict[str, int]


class SurplusPart(Part):
    """Work that was cut off because other work was enough: attempts that were ended, and all those of groups that their
    batch did without. What an engine had sampled of a turn that was cut off is not known."""

    groups: int
    attempts: int
    sampled_tokens: int
    seconds: float
    """Of the attempts, added up."""


class FatePart(Part):
    """Closed groups with one fate: `trained` (they were in a batch), `left_over`, or the reason for which they were
    dropped. `sampled_tokens`: mean of their valid episodes; None where there is none."""

    fate: str
    groups: int
    sampled_tokens: float | None


class FinishOrderPart(Part):
    """What trained against what was admitted beside it, means over the steps; storage/finish_order.py defines them."""

    policy: str
    """The run's `rollout.pool_policy`."""
    tokens_consumed: float | None
    tokens_admitted: float | None
    tokens_siblings: float | None
    reward_consumed: float | None
    reward_admitted: float | None
    reward_siblings: float | None
    open: int
    """Groups beside the batches that have not closed yet, over the steps that count them."""


class GroupsPart(Part):
    closed: int
    eligible: int
    short: int
    """Closed with fewer valid siblings than `group_size`."""
    trained: int
    replaced_attempts: int
    dropped: dict[str, int]
    """Closed groups that trained nothing, by reason; `left_over` were eligible but too stale or not needed any more."""
    fates: list[FatePart]
    surplus: SurplusPart


class QuarantinePart(Part):
    """A task that the run admits no more."""

    task: str
    why: str
    since: float


class VoidPart(Part):
    """A batch that taught nothing: no step was made of it, and its episodes train no more."""

    batch_id: str
    step: int
    reason: str
    episodes: int
    groups: int


class Summary(Part):
    """The figures that a person asks for first; means over the run's steps."""

    time_to_trainable_batch_s: float | None
    """Median of the steps after the first, whose batch also waited for the start; of all where there is one."""
    tail_s: float | None
    """Median over the same steps of the time that the last 5 % of the episodes take."""
    time_parts_s: dict[str, float]
    off_policy_steps: float | None
    off_policy_steps_max: float | None
    mismatch_kl: float | None
    mismatch_kl_max: float | None
    divergence: float | None
    publish_latency_s: float | None
    pause_s: float | None
    """Mean over loads that were proven."""
    infra_share: float | None
    """infra_failure and unknown among all attempts of training."""
    short_share: float | None
    """Short groups among those of a batch; biased towards what did not fail."""
    sampled_tokens: int
    cache_hit_share: float | None
    """Prompt tokens that an engine had in its cache already."""


class GpuHoursPart(Part):
    """`gpu_hours/waiting_on_env`, as storage/waiting.py defines it."""

    gpus: float
    """That wait, by `cost.gpus` of the limits."""
    waiting_on_env: float | None
    """GPU-hours; None before the first update."""
    by_cause: dict[str, float]
    """Of it for boot, act, verify, queue and siblings."""
    price: float
    """Of a GPU-hour; 0 where nobody said."""
    cost: float | None
    """None without a price."""


class FailurePart(Part):
    """Attempts that no fault of the model ended, alike in where and why."""

    stop_reason: str
    why: str
    attempts: int
    example: str
    """One of the attempts, by id."""


class MemberPart(Part):
    """An episode of a batch and what it was worth there."""

    attempt_id: str
    group_id: str
    task: str
    reward: float | None
    advantage: float | None
    min_version: int | None
    max_version: int | None
    stop_reason: str
    sampled_tokens: int


class BatchPart(Part):
    batch_id: str
    step: int
    state: str
    checkpoint: str
    version: int | None
    """The version that the batch made, once published."""
    members: list[MemberPart]


class Report(Part):
    """Everything about one run."""

    run: str
    state: str
    reason: str
    mode: str
    model: str
    taskset: str
    seed: int
    resume_from: str | None
    started_at: float
    ended_at: float | None
    seconds: float
    step: int
    steps_planned: int
    policy_version: int
    max_mismatch_kl: float | None
    max_off_policy_steps: int | None
    readiness: list[QuestionPart]
    """The six questions, always in this order: batch readiness, policy freshness, numeric alignment, environment
    reliability, weight publication, evaluation."""
    summary: Summary
    evaluation: EvaluationPart
    steps: list[StepPart]
    versions: list[VersionPart]
    outcomes: dict[str, dict[str, int]]
    """Attempts by use (train, evaluation) and outcome."""
    stop_reasons: dict[str, dict[str, int]]
    gpu_hours: GpuHoursPart
    failures: list[FailurePart]
    """The commonest infrastructure failures and unknown endings, of training and of evaluation."""
    outcomes_over_time: list[BucketPart]
    kinds: list[KindPart]
    groups: GroupsPart
    finish_order: FinishOrderPart
    quarantined: list[QuarantinePart]
    taskset_health: TasksetPart
    rewards: RewardsPart
    """Those that an operator marked as wrong, and those that look wrong."""
    void_batches: list[VoidPart]
    publications: list[PublicationPart]
    weight_troubles: list[WeightTroublePart]
    policy_age: PolicyAgePart
    spanning: list[SpanningPart]
    incidents: list[IncidentPart]
    """What went wrong, in the order in which it began."""
    last_batches: list[BatchPart]
