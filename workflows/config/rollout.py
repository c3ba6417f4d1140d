"""Sections `rollout`, `sampling` and `sandbox`: how episodes are made, of which tasks, and in what they act."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from workflows.config.base import Section
from workflows.contracts import (
    EXTERNAL_HARNESS,
    SHELL_HARNESS,
    TOOLS_HARNESS,
    AgentProgram,
    PoolPolicy,
    RolloutLimits,
    ShortGroup,
)


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


class SandboxConfig(Section):
    """How the sandboxes of the run are kept in."""

    runtime: str = Field(
        "",
        max_length=64,
        pattern=r"^[A-Za-z0-9_.-]*$",
        description="Container runtime, by the name that the hosts' Docker has for it, as runsc for gVisor; empty: its"
        " own. A host without it refuses.",
    )
