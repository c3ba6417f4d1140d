"""Messages of Episode, Group and Evaluation: what they are given, and what they report and record."""

from __future__ import annotations

from pydantic import Field

from workflows.contracts.base import Message, TaskRef
from workflows.contracts.training import EngineInfo
from workflows.contracts.words import SHELL_HARNESS, EpisodeKind, KvPlan, Outcome, ShortGroup, StopReason


class AgentProgram(Message):
    """An agent program of anybody's, which is started for each attempt of harness external."""

    command: str = Field(min_length=1, max_length=8000, description="Shell command line that starts it.")
    inside: bool = Field(
        False,
        description="Start it in the sandbox, as the agent, where its image has it; false: on the worker's machine.",
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        description="Variables beside those of docs/harnesses.md; nothing else of the worker's environment is there.",
    )
    own_time_s: float = Field(
        600,
        gt=0,
        le=7200,
        description="Seconds it may take beside its calls to the policy and to the sandbox; past them it is killed.",
    )
    grace_s: float = Field(
        20, ge=0, le=600, description="Seconds it gets to end by itself once a budget is spent; then it is killed."
    )


class RolloutLimits(Message):
    """What one episode may use. Copied from the run's configuration into each episode."""

    temperature: float = Field(ge=0)
    """0, always the likeliest token, is for evaluation alone."""
    max_turns: int
    max_tokens_per_turn: int
    max_tokens: int
    context_length: int
    step_timeout_s: float
    time_budget_s: float
    max_output_chars: int
    malformed_reminders: int
    generate_timeout_s: float = 600.0
    """Seconds of one answer, its wait in the engine included, its wait for a place there not."""
    failure_reward: float = 0.0
    replay_on_loss: bool = False
    """Whether a lost sandbox's journal is replayed into a fresh one, instead of giving the attempt up."""
    kv: KvPlan = KvPlan.DROP
    """What requests may find in an engine's cache of earlier weights."""
    top_p: float = Field(1.0, gt=0, le=1)
    """This, top_k and min_p are other than off in evaluations alone, where what will serve has them."""
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, lt=1)
    harness: str = SHELL_HARNESS
    """shell, tools, external or `module:factory`."""
    agent: AgentProgram | None = None
    """For harness external."""
    sandboxes: str = ""
    """Queue on which a sandbox is asked for; empty: the episode's own, whose worker has them."""
    runtime: str = ""
    """Container runtime of its sandboxes, by the daemon's name for it; empty: the daemon's own."""


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
    pinned_version: int | None = None
    """The only policy version whose tokens it may be made of; None: those that its run serves."""

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
    """The start of the action, for people; the whole is in the segment."""
    exit_code: int | None = None
    timed_out: bool = False
    output_digest: str = ""
    """`ActOutput.output_digest` of the turn's command; empty where it ran none."""
    asked_at: float = 0.0
    """When an engine was first asked for the answer, seconds since the epoch."""
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
    host: str = ""
    """Where its last sandbox lived; empty for one that never had any."""
    evidence: dict[str, str] = {}
    """What was measured on the host when an ending had to be laid at the model's door or ours; empty for the rest."""
    replays: int = 0
    """Fresh sandboxes into which the attempt's journal was replayed after a loss."""
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
        return self.outcome.valid

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
    replays: int = 0

    @property
    def valid(self) -> bool:
        return self.outcome.valid


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
    short_group: ShortGroup = ShortGroup.DROP
    redundancy: int = 0
    """Spare siblings: the first `group_size` valid ones to end are the group, the others are surplus."""
    tells_left: bool = False
    """It sends `siblings_left`, too. Groups of older histories do not."""
    draw: int | None = None
    """Number of the draw that it is for; None where the run takes its tasks in order."""

    @property
    def siblings(self) -> int:
        return self.group_size + self.redundancy

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
    short: bool = False
    """Closed with fewer valid siblings than `group_size`."""
    min_version: int | None = None
    max_version: int | None = None
    outcomes: dict[str, int] = {}
    """Endings of all attempts, replaced ones too; those that were still going when it closed are surplus."""
    replaced: int = 0
    sampled_tokens: int = 0
    started_at: float = 0.0
    closed_at: float = 0.0
    first_sibling_at: float = 0.0
    """When the first sibling ended; until `closed_at` the others kept it waiting."""
    replay: str = ""
    """The archived success that joined it, an attempt id; not one of `members`."""
    draw: int | None = None
    """Number of the draw that it was for."""

    def joined_by(self, attempt_id: str) -> GroupResult:
        """The group with an archived success, which may train; as it is where there is none."""
        joined = {"eligible": True, "reason": "", "replay": attempt_id}
        return self.model_copy(update=joined) if attempt_id else self


class SiblingsLeft(Message):
    """A group's word to its run, each time that half of those are left which were: how many siblings still go."""

    number: int
    left: int


class RecordedGroup(Message):
    replay: str = ""
    """The archived success that joins the group; empty for none."""


class EvaluationInput(Message):
    run: str
    version: int
    model: str
    tasks: list[TaskRef]
    samples_per_task: int
    concurrency: int
    limits: RolloutLimits
    seed: int
    name: str = ""
    """Of one that a request started, its workflow's id; empty for a run's own, of which a version has one."""
    engines: list[EngineInfo] = []
    """Those that it is made on, pinned to the version. None in inputs that are older than fingerprints."""
    manifest: str = ""
    """Key of the manifest of the version's weights."""
    dtype: str = "auto"
    """What a request has the engines serve in; a run's own takes them as they are."""
    quantization: str = ""
    """What a request has the weights quantized to, `int8`; empty: not at all."""

    @property
    def evaluation_id(self) -> str:
        return f"{self.run}/{self.name or f'eval-v{self.version}'}"


class EvaluationResult(Message):
    version: int
    episodes: int
    """Valid episodes that the mean is over."""
    mean_reward: float
    by_kind: dict[str, float] = {}
    """Mean reward per kind of task."""
    excluded: int = 0
    """Episodes that infrastructure took, after their replacements."""
    redone: int = 0
    """Attempts that did not count, because their tokens are of other weights."""
    fingerprint: str = ""
    """Digest of the serving fingerprint; empty in results that are older than it, and where refused."""
    refused: str = ""
    """Why there is no result: it would have mixed what is not one."""
    low: float | None = None
    """The 95 % interval of the mean."""
    high: float | None = None
