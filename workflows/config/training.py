"""Section `training`: the updates, from the learning rate to the state that is saved of them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AliasChoices, Field

from workflows.config.base import Section
from workflows.contracts import Baseline, Correction, Loss, OnStale


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
