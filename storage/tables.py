"""The lineage tables: which token trained which checkpoint.

The database enforces "once": every row has a natural key, and `BatchMember` has the attempt as its primary key, so a
trajectory can be in one batch only. Rows are written by idempotent upsert (storage/queries.py); nothing here counts.
"""

from typing import Any

from sqlalchemy import JSON, Column, Index, text
from sqlmodel import Field, SQLModel

VOID = "void"
"""State of a batch that taught nothing: no step was made of it, and its episodes are used up."""
NOT_VOID = text(f"state != '{VOID}'")


def _json() -> Any:
    return Field(default_factory=dict, sa_column=Column(JSON, nullable=False))


class Run(SQLModel, table=True):
    """One TrainingRun. Times are seconds since the epoch everywhere."""

    id: str = Field(primary_key=True)
    state: str
    reason: str = ""
    config: dict[str, Any] = _json()
    mode: str
    seed: int
    execution: str = ""
    """The workflow's first execution: a second run under the same id is refused."""
    temporal_namespace: str = Field("", sa_column_kwargs={"server_default": ""})
    """`<name>/<id>` of the namespace that it was started in: only there is known whether its workflow runs. Empty where
    nobody wrote it down."""
    step: int = 0
    policy_version: int = 0
    resume_from: str | None = None
    train_tasks: int | None = None
    """Tasks that it began with; None in rows older than the column."""
    started_at: float
    ended_at: float | None = None


class Task(SQLModel, table=True):
    """One task as a run met it."""

    id: str = Field(primary_key=True, description="<taskset>/<task id>")
    taskset: str
    task_id: str
    split: str
    kind: str = ""
    instruction: str = ""
    oracle_commands: int | None = None
    """Commands with which the oracle solves it; None where that is not known, as of a script, and in older rows."""


class Group(SQLModel, table=True):
    id: str = Field(primary_key=True)
    run: str = Field(foreign_key="run.id", index=True)
    task: str = Field(index=True)
    number: int
    eligible: bool
    reason: str = ""
    mean_reward: float | None = None
    outcomes: dict[str, Any] = _json()
    members: list[str] | None = Field(None, sa_column=Column(JSON(none_as_null=True), nullable=True))
    """Attempts that may train, in sibling order; None in rows older than the column: all valid ones."""
    replaced: int = 0
    short: bool = False
    """Closed with fewer valid siblings than the run's `group_size`."""
    replay: str = Field("", sa_column_kwargs={"server_default": ""})
    """The archived success that joined it, an attempt id; empty for most."""
    draw: int | None = None
    """Number of the draw that it was for; None where the run took its tasks in order."""
    started_at: float
    closed_at: float


class Quarantine(SQLModel, table=True):
    """A task that a run admits no more, because its groups kept closing without enough valid siblings."""

    run: str = Field(primary_key=True, foreign_key="run.id")
    task: str = Field(primary_key=True)
    why: str
    since: float


class QuarantineMark(SQLModel, table=True):
    """An operator's word that the rewards of a task's episodes in a run, or of one attempt, were wrong. It holds while
    `undone_at` is None; storage/quarantine.py says what for."""

    run: str = Field(primary_key=True, foreign_key="run.id")
    kind: str = Field(primary_key=True)
    """`task` or `episode`."""
    target: str = Field(primary_key=True)
    """A task's key or an attempt's id."""
    number: int = Field(primary_key=True)
    """0 for the first, one more each time that it was undone and marked again."""
    why: str
    by: str
    since: float
    undone_at: float | None = None
    undone_by: str = ""
    undone_why: str = ""


class Draw(SQLModel, table=True):
    """One place in the order of a run's tasks, where rows decide it. Made once, and changed by nothing."""

    run: str = Field(primary_key=True, foreign_key="run.id")
    number: int = Field(primary_key=True)
    task: str
    difficulty: str
    """What its task was held to be: a word of workflows/difficulty.py."""
    policy_version: int
    """The run's when it was drawn."""
    drawn_at: float


class ChangedTask(SQLModel, table=True):
    """A task that an operator added to a running run, or retired from it."""

    run: str = Field(primary_key=True, foreign_key="run.id")
    number: int = Field(primary_key=True)
    """Of the operator's request."""
    task: str = Field(primary_key=True)
    position: int
    """Within the request."""
    change: str
    """added or retired."""
    why: str = ""
    policy_version: int
    at: float


class Episode(SQLModel, table=True):
    """One attempt at an episode; `id` is the attempt id, which is its workflow id too."""

    id: str = Field(primary_key=True)
    episode_id: str = Field(index=True)
    group_id: str = Field(index=True)
    run: str = Field(foreign_key="run.id", index=True)
    kind: str
    task: str = Field(index=True)
    attempt: int
    outcome: str = Field(index=True)
    stop_reason: str
    reward: float | None
    why: str = ""
    tampered: bool = False
    image_id: str = ""
    host: str = Field("", index=True, sa_column_kwargs={"server_default": ""})
    """Where its last sandbox lived; empty for one that never had any, and in older rows."""
    evidence: dict[str, Any] = _json()
    """What was measured on the host when the ending had to be laid at the model's door or ours."""
    replays: int = 0
    seed: int = 0
    min_version: int | None = None
    max_version: int | None = None
    sampled_tokens: int = 0
    sequence_tokens: int = 0
    queue_s: float = 0.0
    boot_s: float = 0.0
    generate_s: float = 0.0
    act_s: float = 0.0
    verify_s: float = 0.0
    started_at: float
    ended_at: float


class Turn(SQLModel, table=True):
    episode: str = Field(primary_key=True, foreign_key="episode.id")
    turn: int = Field(primary_key=True)
    segment: str | None = None
    engine: str = ""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    cached_tokens: int = 0
    min_version: int = 0
    max_version: int = 0
    finish_reason: str = ""
    action: str = ""
    exit_code: int | None = None
    timed_out: bool = False
    output_digest: str = ""
    generate_s: float = 0.0
    act_s: float = 0.0
    queue_s: float = 0.0
    asked_at: float = Field(0.0, sa_column_kwargs={"server_default": "0"})
    """When an engine was first asked for the answer; 0 in rows older than the column."""


class Batch(SQLModel, table=True):
    """One optimizer update. `state`: reserved -> trained -> published, or reserved -> void. `fence` rises with each try
    of the update; only the holder of the newest may commit. A step has one batch that is not void."""

    id: str = Field(primary_key=True)
    run: str = Field(foreign_key="run.id", index=True)
    step: int
    policy_version: int
    state: str = "reserved"
    reason: str = ""
    """Why it is void."""
    fence: int = 0
    checkpoint: str = ""
    metrics: dict[str, Any] = _json()
    waited: dict[str, Any] = _json()
    """Seconds: `to_trainable_batch`, its parts, `median` and `tail`, as storage/waiting.py defines them."""
    tail: dict[str, Any] = _json()
    """Who caused the tail: `group`, `attempt`, and `parts`, that attempt's way through the wait in seconds."""
    reserved_at: float
    trained_at: float | None = None

    __table_args__ = (
        Index("batch_run_step", "run", "step", unique=True, sqlite_where=NOT_VOID, postgresql_where=NOT_VOID),
    )


class BatchMember(SQLModel, table=True):
    """The attempt's place in the one batch that it may train."""

    episode: str = Field(primary_key=True, foreign_key="episode.id")
    batch: str = Field(foreign_key="batch.id", index=True)
    group_id: str
    position: int
    advantage: float | None = None


class Replay(SQLModel, table=True):
    """One use of an archived success: it trained once more, with a later group of its task."""

    batch: str = Field(primary_key=True, foreign_key="batch.id")
    group_id: str = Field(primary_key=True)
    episode: str = Field(foreign_key="episode.id", index=True)
    advantage: float | None = None


class PolicyVersion(SQLModel, table=True):
    run: str = Field(primary_key=True, foreign_key="run.id")
    version: int = Field(primary_key=True)
    step: int
    batch: str | None = None
    checkpoint: str
    """Key of the training state's manifest."""
    created_at: float


class Publication(SQLModel, table=True):
    run: str = Field(primary_key=True)
    version: int = Field(primary_key=True)
    manifest: str
    digest: str
    bytes: int
    seconds: dict[str, Any] = _json()
    published_at: float


class EngineLoad(SQLModel, table=True):
    run: str = Field(primary_key=True)
    version: int = Field(primary_key=True)
    engine: str = Field(primary_key=True)
    proven: bool
    why: str = ""
    pause_s: float = 0.0
    seconds: dict[str, Any] = _json()
    cached_tokens_after: int = 0
    canary_max_abs: float = 0.0
    checked: int = Field(0, sa_column_kwargs={"server_default": "0"})
    """Tensors whose checksums in the engine were the manifest's."""
    loaded_at: float


class WeightTry(SQLModel, table=True):
    """One try at a weight update: to publish a version, or to bring it to an engine. Written when it begins."""

    id: str = Field(primary_key=True)
    run: str = Field(index=True)
    version: int
    engine: str = ""
    """Empty: the publication."""
    part: str
    """The one in which it is or ended. Of a load `reach`, `fetch`, `stage`, `swap`, `prove`, or `restart` for an engine
    that was started anew; of a publication those of `Publication.seconds`, `rows` and `retention`."""
    began_at: float
    ended_at: float | None = None
    ended: str = ""
    """`proven`, `published`, `unproven`, `failed`, `cancelled` (nobody waited for it any more), `interrupted` (its
    process ended), `restarted`; empty while it goes on."""
    why: str = ""


class EngineLease(SQLModel, table=True):
    """Which run the engines serve; one row, `name` is always `engines`."""

    name: str = Field(primary_key=True)
    run: str
    since: float


class Evaluation(SQLModel, table=True):
    run: str = Field(primary_key=True)
    version: int = Field(primary_key=True)
    episodes: int
    mean_reward: float
    excluded: int = 0
    by_kind: dict[str, Any] = _json()
    ended_at: float


class ServedEvaluation(SQLModel, table=True):
    """One evaluation with the fingerprint that it was made on. `evaluation` has those that are points of a run's own
    curve; here are these and all others, also those that were refused."""

    id: str = Field(primary_key=True)
    """`<run>/eval-v<version>` for a run's own, `<run>/<workflow id>` for one that was asked for. It is the group of its
    episodes."""
    run: str = Field(foreign_key="run.id", index=True)
    version: int
    workflow: str = Field(index=True)
    execution: str = ""
    """The workflow's first execution: a second evaluation under the same id is refused."""
    temporal_namespace: str = ""
    """As in Run: only there is known whether its workflow runs."""
    in_run: bool
    state: str
    """An EvaluationState."""
    reason: str = ""
    request: dict[str, Any] = _json()
    """What was asked for, as it was given; empty for a run's own."""
    model: str = ""
    taskset: str = ""
    tasks: int = 0
    samples_per_task: int = 1
    seed: int = 0
    manifest: str = ""
    fields: dict[str, Any] = _json()
    """The fingerprint, field by field."""
    fingerprint: str = ""
    """Its digest; empty where there is no result."""
    settings: str = ""
    """Digest of the fields but for the weights."""
    engines: dict[str, Any] = _json()
    """Names, with the digest of the parameters that each held."""
    left_out: dict[str, Any] = _json()
    """Engines that did not carry the version, and why."""
    scores: dict[str, Any] = _json()
    """By task, `{"rewards": [...], "passed": n}` of the episodes that count, read from their rows at the end."""
    excluded: int = 0
    redone: int = 0
    """Attempts that did not count, because their tokens are of other weights."""
    started_at: float
    ended_at: float | None = None


class Serving(SQLModel, table=True):
    """How an engine was last seen to serve a run's weights, and since when."""

    run: str = Field(primary_key=True)
    engine: str = Field(primary_key=True)
    version: int
    facts: dict[str, Any] = _json()
    """The engine's part of a fingerprint."""
    seen_at: float
