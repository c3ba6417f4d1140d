"""Every message, enum, queue name and identifier rule that workflows and activities share.

Owns the words that cross a process boundary. A leaf: the standard library and pydantic only, so that any module may
import it. Messages carry identifiers, counts and short texts; tokens, tensors and logs stay in the object store.

Identifiers are derived, never counted: a run is its workflow id, a group `<run>/g<n>`, an episode `<run>/g<n>/e<k>`,
an attempt `<run>/g<n>/e<k>/a<m>`, a batch `<run>/b<step>`, an evaluation `<run>/eval-v<version>`.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class Queue(StrEnum):
    """Task queues. One box and a cluster use the same names; a role's process polls one of them."""

    CONTROL = "control"
    """TrainingRun workflows and lineage writes."""
    EPISODES = "episodes"
    """Group, Episode and Evaluation workflows with their generate, act, verify and release activities."""
    TRAINING = "training"
    """The update and the publication: one slot per trainer."""


def engine_queue(host: str) -> str:
    """The queue on which the engines of `host` are told to serve and to load weights."""
    return f"engine@{host}"


class Message(BaseModel):
    """Base of every message: unknown fields are refused, instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# --- endings -----------------------------------------------------------------------------------------------------


class Outcome(StrEnum):
    """What an episode's ending means for training. Only the first two are valid."""

    MODEL_SUCCESS = "model_success"
    MODEL_FAILURE = "model_failure"
    INFRA_FAILURE = "infra_failure"
    UNKNOWN = "unknown"


class StopReason(StrEnum):
    """Why an episode ended."""

    FINISHED = "finished"
    """The agent said that it is done."""
    MAX_TURNS = "max_turns"
    """The turn budget is spent."""
    MAX_TOKENS = "max_tokens"
    """The token budget is spent, of one turn or of the episode."""
    CONTEXT_FULL = "context_full"
    """The next prompt does not fit the context."""
    TIME_BUDGET = "time_budget"
    """The agent's own commands used up their time."""
    SANDBOX_KILLED_BY_AGENT = "sandbox_killed_by_agent"
    """The agent broke its own sandbox: killed its shell, filled its disk, ran out of memory."""
    MALFORMED_ACTION = "malformed_action"
    """No action could be read, after the allowed reminders."""
    VERIFIER_BROKEN_BY_ANSWER = "verifier_broken_by_answer"
    """The answer makes the verifier crash or hang, and a known-good answer does not."""
    TAMPERED = "tampered"
    """Tests or verifier were touched, or an expected test is missing from the result."""
    ENGINE_LOST = "engine_lost"
    """The inference engine could not be reached or lost its weights."""
    SANDBOX_LOST = "sandbox_lost"
    """The sandbox, its host or its daemon went away without the agent's doing."""
    STORAGE_LOST = "storage_lost"
    """The object store or the database could not be reached."""
    VERIFIER_LOST = "verifier_lost"
    """The verifier breaks on a known-good answer too."""
    UNDETERMINED = "undetermined"
    """Evidence is missing or contradictory."""


class FailureType(StrEnum):
    """`ApplicationError.type` of every failure that an activity names. Raised at the boundary that was crossed."""

    ENGINE = "EngineLost"
    SANDBOX = "SandboxLost"
    STORAGE = "StorageLost"
    VERIFIER = "VerifierLost"
    VERIFIER_BROKEN = "VerifierBrokenByAnswer"
    TRAINER = "TrainerFailed"
    INVALID_CONFIG = "InvalidRunConfig"
    PAYLOAD = "PayloadTooLarge"
    FENCED = "Fenced"
    """An older attempt tried to commit after a newer one had begun."""


class RunState(StrEnum):
    """Where a TrainingRun stands."""

    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    DEGRADED = "degraded"
    """Admission is held because groups keep closing without a valid sibling."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


# --- tasks and sandboxes ------------------------------------------------------------------------------------------


class Split(StrEnum):
    TRAIN = "train"
    HELD_OUT = "held_out"


class TaskRef(Message):
    """Names one task of a taskset; activities read its content from the taskset. Example: shell, train, count-17."""

    taskset: str
    split: Split
    task_id: str


class SandboxLease(Message):
    """One live sandbox and whose it is. `socket_dir` is a path on `host`."""

    sandbox_id: str
    container_id: str
    image_id: str
    host: str
    attempt_id: str


class Timing(Message):
    """Seconds of one activity: waiting for a worker, and running."""

    queue_s: float = 0.0
    run_s: float = 0.0


class AcquireInput(Message):
    run: str
    group_id: str
    attempt_id: str
    task: TaskRef


class AcquireOutput(Message):
    lease: SandboxLease
    warm: bool = False
    """True when the sandbox had been started before anyone asked."""
    timing: Timing = Timing()


class Sampling(Message):
    """Sampling parameters of a generation. Training allows temperature alone."""

    temperature: float = Field(gt=0)
    max_tokens: int = Field(ge=1)
    """Most tokens of this turn."""
    context_length: int = Field(ge=16)
    """Most tokens of prompt and answer together."""


class ActionKind(StrEnum):
    COMMAND = "command"
    FINAL = "final"
    MALFORMED = "malformed"


class Action(Message):
    """What the sampled text asks for. `command` for COMMAND, `answer` for FINAL, `error` for MALFORMED."""

    kind: ActionKind
    command: str = ""
    answer: str = ""
    error: str = ""


class GenerateInput(Message):
    run: str
    attempt_id: str
    session: str
    """Routing key of the episode: its later turns go where its cache is."""
    turn: int = Field(ge=0)
    model: str
    """Folder of the run's model: its tokenizer and chat template."""
    task: TaskRef
    segments: list[str] = []
    """Object-store keys of the segments of the earlier turns, oldest first."""
    observation: str | None = None
    """What the agent sees of its last action; None in turn 0."""
    sampling: Sampling
    seed: int = Field(ge=0)
    priority: int = 0


class FinishReason(StrEnum):
    """The engine's own word on why a generation ended; nothing else decides it."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT_FULL = "context_full"
    """The prompt left no room: nothing was generated."""


class GenerateOutput(Message):
    segment: str | None
    """Object-store key of this turn's segment; None when the context was full."""
    action: Action
    text: str = ""
    """The sampled text for people, cut to 2,000 characters."""
    finish_reason: FinishReason
    engine: str = ""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    cached_tokens: int = 0
    min_version: int = 0
    max_version: int = 0
    timing: Timing = Timing()


class ActInput(Message):
    lease: SandboxLease
    op_id: str
    """Key of the command inside the sandbox: a retry reads the result instead of running again."""
    turn: int
    command: str
    step_timeout_s: float
    max_output_chars: int


class ActOutput(Message):
    exit_code: int | None
    """None when the command was ended by a signal or by its time-out."""
    signal: int | None = None
    timed_out: bool = False
    output: str = ""
    """stdout and stderr as they came, invalid UTF-8 replaced, cut to `max_output_chars` with a mark."""
    total_bytes: int = 0
    sandbox_broken: str = ""
    """Why the sandbox can't be used any more through the agent's own doing; empty while it can."""
    command_s: float = 0.0
    """Time of the command itself, without queueing: what counts in the agent's time budget."""
    replayed: bool = False
    """True when a retry found the result of an earlier try."""
    timing: Timing = Timing()

    def observation(self) -> str:
        """What the agent sees of its command: the output, then how it ended where that was not exit 0."""
        if self.timed_out:
            ending = f"(timed out after {self.command_s:.0f} s)"
        elif self.signal is not None:
            ending = f"(ended by signal {self.signal})"
        elif self.exit_code != 0:
            ending = f"(exit {self.exit_code})"
        else:
            ending = ""
        body = self.output.rstrip("\n")
        return "\n".join(part for part in (body, ending) if part) or "(no output)"


class VerifyInput(Message):
    lease: SandboxLease
    task: TaskRef
    answer: str
    """The agent's final answer, empty if it gave none."""


class VerifyOutput(Message):
    reward: float
    passed: bool
    detail: str = ""
    tampered: bool = False
    timing: Timing = Timing()


class ReleaseInput(Message):
    attempt_id: str
    lease: SandboxLease | None = None
    """None when the attempt never learnt what it had acquired: the release then goes by label."""


class SweepInput(Message):
    """Remove what a closed run left behind: containers by label, spool files, unfinished uploads."""

    run: str


class SweepOutput(Message):
    containers: int = 0
    files: int = 0
    uploads: int = 0


# --- trajectories -------------------------------------------------------------------------------------------------


class Segment(Message):
    """One turn's tokens: the prompt tokens that this turn added, then the sampled ones. Aligned lists of length T.

    A trajectory is the concatenation of its segments. Example of a turn whose observation has two tokens and whose
    answer has three::

        Segment(turn=1, token_ids=[12, 7, 40, 41, 2], loss_mask=[0, 0, 1, 1, 1],
                logprobs=[0.0, 0.0, -0.1, -0.7, -0.01], versions=[-1, -1, 3, 3, 4], temperature=1.0, ...)
    """

    turn: int
    token_ids: list[int]
    loss_mask: list[int]
    """1 for a sampled token (a sampled stop token too), 0 for every other."""
    logprobs: list[float]
    """Natural log, at `temperature`; 0.0 where the mask is 0."""
    versions: list[int]
    """policy_version per token as the engine reported it; -1 where the mask is 0."""
    temperature: float
    finish_reason: FinishReason
    text: str
    engine: str
    cached_tokens: int = 0


# --- episodes and groups ------------------------------------------------------------------------------------------


class EpisodeKind(StrEnum):
    TRAIN = "train"
    EVALUATION = "evaluation"


class RolloutLimits(Message):
    """What one episode may use. Copied from the run's configuration into each episode."""

    temperature: float = Field(gt=0)
    max_turns: int
    max_tokens_per_turn: int
    max_tokens: int
    context_length: int
    step_timeout_s: float
    time_budget_s: float
    max_output_chars: int
    malformed_reminders: int
    failure_reward: float = 0.0


class EpisodeInput(Message):
    run: str
    group_id: str
    index: int
    attempt: int
    kind: EpisodeKind
    model: str
    task: TaskRef
    limits: RolloutLimits
    seed: int
    """Seed of this sibling; each turn derives its own. Independent of the attempt."""
    priority: int = 0

    @property
    def episode_id(self) -> str:
        return f"{self.group_id}/e{self.index}"

    @property
    def attempt_id(self) -> str:
        return f"{self.episode_id}/a{self.attempt}"


class TurnRecord(Message):
    """One turn as lineage keeps it."""

    turn: int
    segment: str | None
    engine: str = ""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    cached_tokens: int = 0
    min_version: int = 0
    max_version: int = 0
    finish_reason: str = ""
    action: str = ""
    """The action, cut to 200 characters."""
    exit_code: int | None = None
    timed_out: bool = False
    generate_s: float = 0.0
    act_s: float = 0.0
    queue_s: float = 0.0


class EpisodeRecord(Message):
    """One attempt's end, as the Episode workflow reports it and as lineage stores it."""

    attempt_id: str
    episode_id: str
    group_id: str
    run: str
    kind: EpisodeKind
    task: TaskRef
    attempt: int
    outcome: Outcome
    stop_reason: StopReason
    reward: float | None
    """None when the outcome is not valid."""
    why: str = ""
    """One sentence for a person."""
    tampered: bool = False
    image_id: str = ""
    seed: int = 0
    min_version: int | None = None
    max_version: int | None = None
    sampled_tokens: int = 0
    sequence_tokens: int = 0
    turns: list[TurnRecord] = []
    queue_s: float = 0.0
    boot_s: float = 0.0
    generate_s: float = 0.0
    act_s: float = 0.0
    verify_s: float = 0.0
    started_at: float = 0.0
    """Seconds since the epoch, workflow time."""
    ended_at: float = 0.0

    @property
    def valid(self) -> bool:
        """The one flag that rules baseline, spread, loss and every denominator."""
        return self.outcome in (Outcome.MODEL_SUCCESS, Outcome.MODEL_FAILURE)

    @property
    def segments(self) -> list[str]:
        return [turn.segment for turn in self.turns if turn.segment is not None]


class EpisodeSummary(Message):
    """What a group needs of an attempt: no per-turn records."""

    attempt_id: str
    outcome: Outcome
    stop_reason: StopReason
    reward: float | None
    min_version: int | None
    max_version: int | None
    sampled_tokens: int
    ended_at: float

    @property
    def valid(self) -> bool:
        return self.outcome in (Outcome.MODEL_SUCCESS, Outcome.MODEL_FAILURE)


class GroupInput(Message):
    run: str
    number: int
    model: str
    task: TaskRef
    group_size: int
    max_replacements: int
    limits: RolloutLimits
    seed: int
    report_to: str
    """Workflow id that gets the `group_done` signal."""

    @property
    def group_id(self) -> str:
        return f"{self.run}/g{self.number}"


class GroupResult(Message):
    """A closed group. `eligible` when it may train; otherwise `reason` says why not."""

    group_id: str
    number: int
    task_id: str
    members: list[str]
    """Attempt ids of the valid siblings, in sibling order."""
    rewards: list[float]
    """Rewards of `members`, same order."""
    eligible: bool
    reason: str = ""
    min_version: int | None = None
    max_version: int | None = None
    outcomes: dict[str, int] = {}
    """Endings of all attempts, replaced ones too."""
    replaced: int = 0
    sampled_tokens: int = 0
    started_at: float = 0.0
    closed_at: float = 0.0
    first_sibling_at: float = 0.0
    """When the first sibling ended; until `closed_at` the others kept it waiting."""


class EvaluationInput(Message):
    run: str
    version: int
    model: str
    tasks: list[TaskRef]
    samples_per_task: int
    concurrency: int
    limits: RolloutLimits
    seed: int

    @property
    def evaluation_id(self) -> str:
        return f"{self.run}/eval-v{self.version}"


class EvaluationResult(Message):
    version: int
    episodes: int
    """Valid episodes that the mean is over."""
    mean_reward: float
    by_kind: dict[str, float] = {}
    """Mean reward per kind of task."""
    excluded: int = 0
    """Episodes that infrastructure took, after their replacements."""


class EvaluationRecord(Message):
    run: str
    result: EvaluationResult


# --- control activities -------------------------------------------------------------------------------------------


class OpenRunInput(Message):
    """Check what the workflow can't see (folders, tasksets, the run to resume from) and write the run's row."""

    run: str
    config: dict[str, object]
    execution: str = ""
    """The workflow's first execution: tells a retry from a second run under the same id."""


class EngineInfo(Message):
    name: str
    """Unique over hosts, e.g. `local-e0`."""
    host: str
    url: str


class OpenRunOutput(Message):
    model: str
    """The model's folder, absolute."""
    train_tasks: int
    held_out_tasks: int
    engines: list[EngineInfo]
    resume_checkpoint: str = ""
    """Manifest key of the training state to start from; empty for a fresh start."""


class PickTasksInput(Message):
    """`count` tasks of a split from position `cursor` of its order for `seed` (an endless, reshuffled cycle)."""

    taskset: str
    split: Split
    seed: int
    cursor: int
    count: int


class PickTasksOutput(Message):
    tasks: list[TaskRef]


class LeaseEnginesInput(Message):
    run: str


class LeaseEnginesOutput(Message):
    held_by: str = ""
    """The run that holds the engines; empty when the lease was given."""


class ClosedGroupsInput(Message):
    group_ids: list[str]


class ClosedGroupsOutput(Message):
    closed: list[str]
    """Those of `group_ids` whose workflow does not run any more."""


class ReserveBatchInput(Message):
    run: str
    step: int
    """The optimizer step that this batch makes; the first is 1."""
    policy_version: int
    """Version of the weights that the step starts from."""
    groups: list[GroupResult]
    waited: dict[str, float] = {}
    """Seconds by part of `time/to_trainable_batch`, without the `time/` prefix; `to_trainable_batch` is the total."""

    @property
    def batch_id(self) -> str:
        return f"{self.run}/b{self.step}"


class ReserveBatchOutput(Message):
    batch_id: str
    episodes: int


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


# --- training, publication, engines -------------------------------------------------------------------------------


class TrainerInput(Message):
    """Bring a warm trainer up for this run and make its state durable as step 0.

    In this and the next messages `config` is the run's configuration with `model` made an absolute folder."""

    run: str
    config: dict[str, object]
    resume_checkpoint: str = ""


class TrainerOutput(Message):
    checkpoint: str
    parameters: int
    world_size: int


class UpdateInput(Message):
    run: str
    config: dict[str, object]
    batch_id: str
    step: int
    policy_version: int


class UpdateOutput(Message):
    step: int
    checkpoint: str
    """Key of the manifest of the training state after the step."""
    metrics: dict[str, float]
    timing: Timing = Timing()


class PublishInput(Message):
    run: str
    config: dict[str, object]
    version: int
    step: int
    checkpoint: str


class PublishOutput(Message):
    version: int
    manifest: str
    """Object-store key of the weights' manifest."""
    digest: str
    bytes: int
    seconds: dict[str, float] = {}


class ServeInput(Message):
    """Have an engine serve the architecture of this model; heartbeats until it answers."""

    run: str
    engine: EngineInfo
    model: str
    context_length: int
    dtype: str = "auto"


class ServeOutput(Message):
    engine: str
    restarted: bool
    seconds: float


class ApplyInput(Message):
    run: str
    engine: EngineInfo
    version: int
    manifest: str


class ApplyOutput(Message):
    engine: str
    version: int
    proven: bool
    pause_s: float
    seconds: dict[str, float] = {}
    cached_tokens_after: int = 0
    canary_max_abs: float = 0.0
    why: str = ""


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
    outcomes: dict[str, int]
    groups_in_flight: int
    groups_ready: int
    groups_dropped: dict[str, int]
    evaluation_first: float | None = None
    evaluation_last: float | None = None
    doing: str = ""
    """What the run waits for now, in words."""


# --- identifier rules ---------------------------------------------------------------------------------------------


def policy_label(run: str, version: int, *, proven: bool = True) -> str:
    """The weight version string an engine carries: `<run>:<version>`, with `?` until the load is proven."""
    return f"{run}:{version}" + ("" if proven else "?")


def parse_policy_label(label: str) -> tuple[str, int, bool] | None:
    """(run, version, proven) of an engine's weight version string, None for one that is not ours."""
    run, _, version = label.rpartition(":")
    digits = version.removesuffix("?")
    return (run, int(digits), not version.endswith("?")) if run and digits.isdecimal() else None


def derive_seed(seed: int, *parts: str | int) -> int:
    """A 31-bit seed that depends on the run's seed and the identifiers alone."""
    digest = hashlib.sha256("/".join(map(str, (seed, *parts))).encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF
