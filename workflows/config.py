"""The run's configuration: what `run.json` may hold, with its bounds, defaults and one sentence on each field.

`parse_run_config` is what TrainingRun calls on the raw input; every mistake comes back as one message that names the
field and what is allowed.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from workflows.contracts import RolloutLimits


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RolloutConfig(Section):
    """How episodes are made."""

    group_size: int = Field(8, ge=2, le=64, description="Siblings per task; the baseline is their mean.")
    groups_per_batch: int = Field(8, ge=1, le=256, description="Eligible groups that make a batch.")
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
    max_replacements: int = Field(4, ge=0, le=64, description="Attempts that a group may replace.")
    failure_reward: float = Field(0.0, description="Reward of endings that are the agent's fault and are not graded.")
    max_off_policy_steps: int = Field(1, ge=0, le=16, description="async: versions a batch may lag.")
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

    def limits(self) -> RolloutLimits:
        return RolloutLimits(**{name: getattr(self, name) for name in RolloutLimits.model_fields})


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
    minibatches: int = Field(1, ge=1, le=16, description="Optimizer steps that one batch is divided into.")
    clip_low: float = Field(0.2, gt=0, lt=1, description="Ratio clipped at 1 - clip_low.")
    clip_high: float = Field(0.28, gt=0, description="Ratio clipped at 1 + clip_high.")
    scale_by_std: bool = Field(True, description="Divide advantages by the group's standard deviation.")
    std_floor: float = Field(
        1e-3, gt=0, description="Smallest deviation divided by: smaller spreads are noise of the verifier's arithmetic."
    )
    importance_cap: float = Field(2.0, ge=1, description="Cap of the truncated importance weight per token.")
    divergence_limit: float = Field(
        0.5, gt=0, description="Groups whose mean divergence from today's policy is above it are left out."
    )
    mismatch_limit: float = Field(
        0.01, gt=0, description="Mean mismatch_kl at which the run stops: engine and trainer compute different models."
    )
    micro_batch_tokens: int = Field(8192, ge=32, description="Padded tokens of one forward pass.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: bfloat16 on GPU, float32 on CPU.")
    deepspeed: dict[str, Any] = Field(default_factory=dict, description="Merged over the DeepSpeed JSON.")


class EvaluationConfig(Section):
    """Held-out evaluation, before the first and after the last update, and every `every` updates between."""

    tasks: int = Field(48, ge=0, description="Held-out tasks; 0 switches evaluation off.")
    samples_per_task: int = Field(1, ge=1, le=64)
    every: int = Field(0, ge=0, description="Updates between evaluations; 0: only the first and the last.")


class PublicationConfig(Section):
    keep_last: int = Field(2, ge=1, description="Versions whose weights and training state are kept.")


class RunConfig(Section):
    """The whole of run.json."""

    model: str = Field(min_length=1, description="A local Hugging Face folder, or the name of a bootstrapped policy.")
    taskset: str = Field("shell", min_length=1, description="Name of a taskset, or a folder of tasks.")
    seed: int = Field(0, ge=0, lt=2**31)
    mode: Literal["sync", "async"] = Field("async", description="async: generation goes on during the update.")
    max_concurrent_episodes: int = Field(32, ge=1, le=1024, description="Episodes in flight.")
    resume_from: str | None = Field(None, description="Id of a run whose last checkpoint this one starts from.")
    continue_as_new_every: int = Field(10, ge=1, description="Updates per workflow history.")
    rollout: RolloutConfig = RolloutConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    publication: PublicationConfig = PublicationConfig()

    @model_validator(mode="after")
    def _budgets(self) -> RunConfig:
        if self.rollout.max_tokens_per_turn >= self.rollout.context_length:
            raise ValueError("rollout.max_tokens_per_turn must be below rollout.context_length")
        return self

    @property
    def capacity(self) -> int:
        """Groups that may be in flight, ready or reserved at once: what the trainer will consume in time."""
        lag = self.rollout.max_off_policy_steps if self.mode == "async" else 0
        return self.rollout.groups_per_batch * (1 + lag)


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
