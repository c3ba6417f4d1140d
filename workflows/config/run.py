"""The whole of run.json: what its sections demand of each other, and how it is read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from workflows.config.base import Section
from workflows.config.publication import EvaluationConfig, PublicationConfig
from workflows.config.rollout import RolloutConfig, SamplingConfig, SandboxConfig
from workflows.config.training import TrainingConfig
from workflows.contracts import RolloutLimits, WeightChannel

MOST_GROUPS = 400
"""Groups in flight and ready that a run's state has room for; each takes some 60 bytes of it."""


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
