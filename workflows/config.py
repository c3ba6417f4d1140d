"""The run's configuration: what `run.json` may hold, with its bounds, defaults and one sentence on each field.

`parse_run_config` is what TrainingRun calls on the raw input; every mistake comes back as one message that names the
field and what is allowed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from workflows.contracts import (
    EXTERNAL_HARNESS,
    SHELL_HARNESS,
    TOOLS_HARNESS,
    AgentProgram,
    Baseline,
    Correction,
    InFlight,
    KvPlan,
    Loss,
    OnStale,
    PoolPolicy,
    RolloutLimits,
    ShortGroup,
    WeightChannel,
)

MOST_GROUPS = 400
"""Groups in flight and ready that a run's state has room for; each takes some 60 bytes of it."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RolloutConfig(Section):
    """How episodes are made."""

    group_size: int = Field(8, ge=2, le=64, description="Siblings per task; the baseline is their mean.")
    group_redundancy: int = Field(
        0,
        ge=0,
        le=16,
        description="Spare siblings: the first group_size valid ones to end are the group, the others are cancelled."
        " Favours what is short; the bias is measured (finish_order/*).",
    )
    groups_per_batch: int = Field(8, ge=1, le=256, description="Eligible groups that make a batch.")
    pool_policy: PoolPolicy = Field(
        PoolPolicy.OLDEST_FIRST, description="Which complete groups a batch takes: oldest_first, ready_first, in_order."
    )
    oversample: float = Field(
        1.0,
        ge=1,
        le=4,
        description="sync: groups in the making, in groups_per_batch; above 1 the surplus is cancelled when the batch"
        " is cut, and the batch depends on the order in which groups finish, which sync mode otherwise rules out.",
    )
    temperature: float = Field(1.0, gt=0, le=2, description="Sampling temperature, above 0.")
    top_p: float = Field(1.0, description="Must be 1 in training: the engine would renormalise over the kept tokens.")
    top_k: int = Field(0, description="Must be 0 in training, for the same reason.")
    min_p: float = Field(0.0, description="Must be 0 in training, for the same reason.")
    max_turns: int = Field(8, ge=1, le=100, description="Generations per episode.")
    max_tokens_per_turn: int = Field(64, ge=1, description="Sampled tokens per turn.")
    max_tokens: int = Field(512, ge=1, description="Sampled tokens per episode.")
    context_length: int = Field(512, ge=32, description="Prompt and sampled tokens together, per episode.")
    step_timeout_s: float = Field(10, gt=0, le=3600, description="Seconds one command may run.")
    time_budget_s: float = Field(60, gt=0, description="Seconds all commands of an episode may run.")
    max_output_chars: int = Field(2000, ge=100, le=16000, description="Characters of output that the agent sees.")
    malformed_reminders: int = Field(1, ge=0, le=5, description="Reminders before malformed actions end it.")
    generate_timeout_s: float = Field(
        600,
        gt=0,
        le=1800,
        description="Seconds an engine may take for one answer, without the wait for room on it; past it the attempt is"
        " engine_lost and replaced.",
    )
    max_replacements: int = Field(4, ge=0, le=64, description="Attempts that a group may replace.")
    short_group: ShortGroup = Field(
        ShortGroup.DROP, description="What becomes of a group with fewer valid siblings than group_size."
    )
    quarantine_after: int = Field(
        3, ge=1, le=100, description="Groups of one task that close short before the task is admitted no more."
    )
    replay_on_loss: bool = Field(
        False, description="Replay a lost sandbox's journal into a fresh one and go on if the outputs agree."
    )
    harness: str = Field(
        SHELL_HARNESS,
        pattern=rf"^({SHELL_HARNESS}|{TOOLS_HARNESS}|{EXTERNAL_HARNESS}|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$",
        description="How the agent plays: shell (fenced commands), tools (a bash tool in the model's own syntax),"
        " external (the program of rollout.agent), or module:factory of one's own; docs/harnesses.md.",
    )
    agent: AgentProgram | None = Field(
        None, description="harness external: the program, which talks to an OpenAI-compatible endpoint of its own."
    )
    failure_reward: float = Field(0.0, description="Reward of endings that are the agent's fault and are not graded.")
    max_off_policy_steps: int = Field(1, ge=0, le=16, description="async: versions a batch may lag.")
    min_off_policy_steps: int | None = Field(
        None,
        ge=0,
        le=16,
        description="async: the lag that admission starts with and never goes below; towards max_off_policy_steps it"
        " follows the measured divergence. None: it is max_off_policy_steps throughout.",
    )
    refill: float = Field(2.0, ge=1, le=16, description="Groups that may close for a batch, in groups_per_batch.")

    @field_validator("top_p")
    @classmethod
    def _top_p(cls, value: float) -> float:
        if value != 1:
            raise ValueError("training needs top_p = 1: the engine's probabilities would not be the trainer's")
        return value

    @field_validator("top_k")
    @classmethod
    def _top_k(cls, value: int) -> int:
        if value not in (0, -1):
            raise ValueError("training needs top_k = 0 (off): the engine's probabilities would not be the trainer's")
        return 0

    @field_validator("min_p")
    @classmethod
    def _min_p(cls, value: float) -> float:
        if value != 0:
            raise ValueError("training needs min_p = 0: the engine's probabilities would not be the trainer's")
        return value

    @model_validator(mode="after")
    def _program(self) -> RolloutConfig:
        if (self.harness == EXTERNAL_HARNESS) != (self.agent is not None):
            raise ValueError("rollout.harness external and rollout.agent, the program, need each other")
        return self

    @property
    def siblings(self) -> int:
        """Episodes that a group starts with."""
        return self.group_size + self.group_redundancy

    def limits(self) -> RolloutLimits:
        own = RolloutLimits.model_fields.keys() & type(self).model_fields.keys()
        return RolloutLimits(**{name: getattr(self, name) for name in own})


class SamplingConfig(Section):
    """Which task comes next. A task's pass rate is (passes + 1) / (episodes + 2) of its latest valid episodes."""

    by: Literal["order", "difficulty"] = Field(
        "order",
        description="order: every task once per cycle, reshuffled by the seed; difficulty: by the pools that the tasks'"
        " pass rates put them in, as often as the weights below say.",
    )
    window: int = Field(
        32, ge=2, le=1024, description="Latest valid episodes of a task, in whole groups, that its pass rate is of."
    )
    unsolvable_below: float = Field(0.06, gt=0, lt=1, description="Pass rate below which a task is unsolvable.")
    hard_below: float = Field(0.25, gt=0, lt=1, description="Pass rate below which a task is hard.")
    saturated_from: float = Field(0.9, gt=0, lt=1, description="Pass rate from which on a task is saturated.")
    unseen_weight: float = Field(1.0, gt=0, le=1000, description="How often an unseen task comes, beside the others.")
    unsolvable_weight: float = Field(0.05, gt=0, le=1000, description="The same of an unsolvable task.")
    hard_weight: float = Field(0.5, gt=0, le=1000, description="The same of a hard task.")
    learning_weight: float = Field(1.0, gt=0, le=1000, description="The same of a task between hard and saturated.")
    saturated_weight: float = Field(0.05, gt=0, le=1000, description="The same of a saturated task.")

    @model_validator(mode="after")
    def _reachable(self) -> SamplingConfig:
        if not self.unsolvable_below < self.hard_below < self.saturated_from:
            raise ValueError("unsolvable_below must be below hard_below, and that below saturated_from")
        lowest, highest = 1 / (self.window + 2), (self.window + 1) / (self.window + 2)
        if lowest >= self.unsolvable_below or highest < self.saturated_from:
            raise ValueError(
                f"window {self.window} is too short for its limits: pass rates go from {lowest:.3f} to"
                f" {highest:.3f}, so that no task could be unsolvable or none saturated"
            )
        return self

    def weight_of(self, difficulty: str) -> float:
        """The weight of the pool of that name."""
        return float(getattr(self, f"{difficulty}_weight"))


class TrainingConfig(Section):
    """How the policy is updated."""

    steps: int = Field(20, ge=1, description="Updates to make.")
    learning_rate: float = Field(1e-6, gt=0, le=1, description="Peak learning rate of AdamW.")
    final_learning_rate: float = Field(
        1.0, gt=0, le=1, description="Share of the peak at the last update, to which it falls linearly; 1: no decay."
    )
    warmup_steps: int = Field(2, ge=0, description="Updates of linear warm-up.")
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0, description="Gradient clipping by global norm.")
    minibatches: int = Field(
        1, ge=1, le=16, description="Optimizer steps that a full batch is divided into; a short one makes fewer."
    )
    loss: Loss = Field(
        Loss.GRPO,
        description="grpo: mean over the step's tokens; dr_grpo: over a constant; gspo: ratios and means of whole"
        " sequences, whose clip bounds are a thousandth of those of tokens (its authors: 3e-4 and 4e-4).",
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="Ratio clipped at 1 - clip_low.")
    clip_high: float = Field(0.28, gt=0, description="Ratio clipped at 1 + clip_high.")
    baseline: Baseline = Field(
        Baseline.MEAN, description="mean of the group, or leave_one_out: mean of the other siblings."
    )
    scale_by_std: bool = Field(True, description="Divide advantages by the group's standard deviation.")
    std_floor: float = Field(
        1e-3, gt=0, description="Smallest deviation divided by: smaller spreads are noise of the verifier's arithmetic."
    )
    kl_coefficient: float = Field(
        0.0, ge=0, le=10, description="Weight of KL(policy || the model of run.json); 0: it is not loaded."
    )
    correction: Correction = Field(
        Correction.TOKEN,
        description="Importance weights of tokens of other weights: per token, per sequence (product or geometric"
        " mean), masked (0 outside of the band), or none.",
    )
    importance_cap: float = Field(2.0, ge=1, description="Cap of the weights of token, sequence and geometric.")
    importance_low: float = Field(0.5, gt=0, le=1, description="masked: weights below it are 0.")
    importance_high: float = Field(5.0, ge=1, description="masked: weights above it are 0.")
    max_divergence: float = Field(
        0.5,
        gt=0,
        validation_alias=AliasChoices("max_divergence", "divergence_limit"),
        description="Mean k3 divergence between a group's policy and today's, above which it is stale.",
    )
    on_stale: OnStale = Field(
        OnStale.DROP, description="drop: stale groups train nothing; downweight: they count max_divergence/divergence."
    )
    warn_mismatch_kl: float = Field(0.001, gt=0, description="Mean mismatch_kl from which the run warns.")
    max_mismatch_kl: float = Field(
        0.01,
        gt=0,
        validation_alias=AliasChoices("max_mismatch_kl", "mismatch_limit"),
        description="Mean mismatch_kl at which the run stops: engine and trainer compute different models.",
    )
    micro_batch_tokens: int = Field(8192, ge=32, description="Padded tokens of one forward pass.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: bfloat16 on GPU, float32 on CPU.")
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = Field(
        "auto", description="The trainer's attention; auto: what transformers takes. `ratchet align` compares them."
    )
    activation_checkpointing: bool = Field(
        False, description="Compute activations again in the backward pass: less memory, about a third more time."
    )
    replay_routing: bool = Field(
        True,
        description="Mixture of experts: tokens go through the experts in the trainer that they went through in the"
        " engine.",
    )
    replay_share: float = Field(
        0.0,
        ge=0,
        le=0.5,
        description="Largest share of a batch's episodes that are earlier successes of tasks that are seldom solved:"
        " each joins a group of its task that has none. 0: off.",
    )
    replay_pass_rate: float = Field(
        0.25, gt=0, le=1, description="The run's pass rate on a task up to which its successes are replayed."
    )
    lora_rank: int = Field(
        0, ge=0, le=1024, description="Rank of a LoRA adapter that trains in place of the model; 0: the model trains."
    )
    lora_alpha: int = Field(0, ge=0, description="Its scale is alpha/rank; 0: twice the rank.")
    lora_targets: list[str] = Field(
        default_factory=list, description="Names of the layers with an adapter, as q_proj; none: all linear layers."
    )
    checkpoint_every: int = Field(
        1,
        ge=1,
        le=100,
        description="Updates per saved training state; a trainer that is lost makes those since the last one again.",
    )
    reshape_checkpoint: bool = Field(
        False,
        description="Take over a training state of another number of trainer processes, through DeepSpeed's universal"
        " checkpoint; ZeRO stages 1 and 2 with Adam or AdamW.",
    )
    deepspeed: dict[str, Any] = Field(default_factory=dict, description="Merged over the DeepSpeed JSON.")


class EvaluationConfig(Section):
    """Held-out evaluation, before the first and after the last update, and every `every` updates between."""

    tasks: int = Field(48, ge=0, le=1000, description="Held-out tasks; 0 switches evaluation off.")
    samples_per_task: int = Field(1, ge=1, le=64)
    every: int = Field(0, ge=0, description="Updates between evaluations; 0: only the first and the last.")


class SandboxConfig(Section):
    """How the sandboxes of the run are kept in."""

    runtime: str = Field(
        "",
        max_length=64,
        pattern=r"^[A-Za-z0-9_.-]*$",
        description="Container runtime, by the name that the hosts' Docker has for it, as runsc for gVisor; empty: its"
        " own. A host without it refuses.",
    )


class PublicationConfig(Section):
    """How new weights are kept, and how engines take them."""

    keep_last: int = Field(2, ge=1, description="Versions whose weights and training state are kept.")
    keep_every: int = Field(
        0, ge=0, description="Weights of every so many versions, from the first on, are kept for good; 0: of none."
    )
    full_every: int = Field(
        1,
        ge=1,
        le=100,
        description="Every so many versions the weights go to the object store whole, between them as what changed"
        " since the version before; 1: always whole. Pays in bfloat16 at learning rates up to 1e-5.",
    )
    max_mbytes_per_s: float = Field(
        0.0, ge=0, description="What one transfer of weights may take of the network, in MB/s; 0: all there is."
    )
    in_flight: InFlight = Field(
        InFlight.KEEP,
        description="Requests under way at a load: finish; abort_continue (cut, and continued from their tokens under"
        " the new weights); or keep (frozen meanwhile).",
    )
    kv: KvPlan = Field(
        KvPlan.DROP,
        description="The engine's cache at a load: drop; salt (new requests never find what older weights filled); or"
        " keep (they do, which mixes weights within a token).",
    )
    rolling: bool = Field(
        False, description="Load engines in turns, so that at least half of them serve; false: all at once."
    )
    store_every: int = Field(
        10,
        ge=1,
        le=1000,
        description="weight_channel direct and colocated: every so many versions the weights go to the object store,"
        " too.",
    )

    def stores(self, version: int, channel: WeightChannel) -> bool:
        """Whether the weights of this version go to the object store."""
        return channel is WeightChannel.S3 or version % self.store_every == 0


class RunConfig(Section):
    """The whole of run.json."""

    model: str = Field(min_length=1, description="A local Hugging Face folder, or the name of a bootstrapped policy.")
    taskset: str = Field("shell", min_length=1, description="Name of a taskset, or a folder of tasks.")
    seed: int = Field(0, ge=0, lt=2**31)
    mode: Literal["sync", "async"] = Field("async", description="async: generation goes on during the update.")
    max_concurrent_episodes: int = Field(32, ge=1, le=1024, description="Episodes in flight.")
    resume_from: str | None = Field(None, description="Id of a run whose last checkpoint this one starts from.")
    continue_as_new_every: int = Field(10, ge=1, description="Updates per workflow history.")
    weight_channel: WeightChannel = Field(
        WeightChannel.S3,
        description="How weights reach the engines: s3 (the object store); direct (a connection to the trainer's"
        " machine); colocated (engines on the trainer's own machine, which take turns with it; sync mode only).",
    )
    rollout: RolloutConfig = RolloutConfig()
    sampling: SamplingConfig = SamplingConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    sandbox: SandboxConfig = SandboxConfig()
    publication: PublicationConfig = PublicationConfig()

    @model_validator(mode="after")
    def _budgets(self) -> RunConfig:
        siblings = self.rollout.siblings
        if siblings > self.max_concurrent_episodes:
            raise ValueError(
                f"max_concurrent_episodes must be at least rollout.group_size + rollout.group_redundancy, {siblings}:"
                " the siblings of a group play at once"
            )
        if self.rollout.max_tokens_per_turn >= self.rollout.context_length:
            raise ValueError("rollout.max_tokens_per_turn must be below rollout.context_length")
        if self.capacity > MOST_GROUPS:
            factor = "oversample" if self.mode == "sync" else "(1 + rollout.max_off_policy_steps)"
            raise ValueError(
                f"rollout.groups_per_batch x {factor} is {self.capacity}: a run holds at most {MOST_GROUPS} groups"
            )
        training = self.training
        if not training.lora_rank and (training.lora_alpha or training.lora_targets):
            raise ValueError(
                "training.lora_alpha and lora_targets need training.lora_rank, which is 0: no adapter trains"
            )
        if training.lora_rank and training.reshape_checkpoint:
            raise ValueError(
                "training.reshape_checkpoint does not work with training.lora_rank: DeepSpeed's universal checkpoint"
                " holds no frozen weights"
            )
        share, episodes = self.training.replay_share, self.rollout.groups_per_batch * self.rollout.group_size
        if 0 < share * episodes / (1 - share) < 1:
            raise ValueError(f"training.replay_share {share} of a batch of {episodes} episodes is less than one")
        if self.weight_channel is WeightChannel.COLOCATED and self.mode == "async":
            raise ValueError(
                "weight_channel colocated needs mode sync: engines rest while the trainer has their device; in async"
                " mode take direct or s3"
            )
        least, most = self.rollout.min_off_policy_steps, self.rollout.max_off_policy_steps
        if least is not None and least > most:
            raise ValueError(f"rollout.min_off_policy_steps, {least}, must not be above max_off_policy_steps, {most}")
        if self.mode == "async" and self.rollout.oversample > 1:
            raise ValueError(
                "rollout.oversample above 1 needs mode sync: in async mode groups beyond a batch go on and train in the"
                " next; rollout.max_off_policy_steps says how many there may be"
            )
        return self

    def limits(self) -> RolloutLimits:
        """What one episode of this run may use."""
        return self.rollout.limits().model_copy(update={"kv": self.publication.kv, "runtime": self.sandbox.runtime})

    @property
    def capacity(self) -> int:
        """Groups that may be in flight, ready or reserved at once: what the trainer will consume in time, and in sync
        mode what `oversample` adds to it."""
        return self.capacity_at(self.rollout.max_off_policy_steps)

    def capacity_at(self, lag: int) -> int:
        """`capacity` where a batch may lag `lag` versions, which says something in async mode only."""
        rollout = self.rollout
        if self.mode == "sync":
            # 10 x 1.1 is 11, whatever a binary fraction makes of it.
            return math.ceil(round(rollout.groups_per_batch * rollout.oversample, 6))
        return rollout.groups_per_batch * (1 + lag)


def model_folder(model: str, models_dir: Path) -> Path:
    """Where `model` of run.json is: a bootstrapped policy of that name in `models_dir`, or the path that it is."""
    return Path(model).expanduser().resolve() if "/" in model else models_dir / model


def parse_run_config(raw: object) -> RunConfig:
    """The validated configuration. Raises ValueError with one line per mistake: field, fault, what was given."""
    if not isinstance(raw, dict):
        raise ValueError(f"the input must be one JSON object as in examples/runs/shell.json, not {type(raw).__name__}")
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise ValueError("\n".join(_describe(item) for item in error.errors())) from None


def _describe(item: Any) -> str:
    field = ".".join(map(str, item["loc"])) or "run.json"
    if item["type"] == "extra_forbidden":
        section = RunConfig.model_fields.get(str(item["loc"][0])) if len(item["loc"]) > 1 else None
        model = section.annotation if section is not None else RunConfig
        return f"{field}: unknown field; allowed here: {', '.join(sorted(getattr(model, 'model_fields', {})))}"
    if item["type"] == "missing":
        return f"{field}: missing"
    return f"{field}: {item['msg'].removeprefix('Value error, ')} (given: {item['input']!r})"
