"""The DeepSpeed JSON of a run: our defaults, the user's `training.deepspeed` merged over them. Called by the engine.

Promises: what the run's configuration decides (learning rate, clipping, dtype, batch sizes) has one place; a JSON that
sets it too is refused with the name of the field that does.
"""

from __future__ import annotations

from typing import Any

from workflows.config import TrainingConfig
from workflows.errors import InvalidConfig

DECIDED_ELSEWHERE = {
    "train_batch_size": "rollout.groups_per_batch",
    "train_micro_batch_size_per_gpu": "training.micro_batch_tokens",
    "gradient_accumulation_steps": "training.micro_batch_tokens",
    "gradient_clipping": "training.max_grad_norm",
    "scheduler": "training.warmup_steps",
    "bf16": "training.dtype",
    "fp16": "training.dtype",
    "optimizer.params.lr": "training.learning_rate",
    "optimizer.params.weight_decay": "training.weight_decay",
}
NEVER_PRINT = 10**9


def deepspeed_config(training: TrainingConfig, *, bfloat16: bool) -> dict[str, Any]:
    """The JSON for deepspeed.initialize at world size 1. Raises InvalidConfig for a key that is decided elsewhere."""
    for path, field in DECIDED_ELSEWHERE.items():
        if _has(training.deepspeed, path):
            raise InvalidConfig(f"training.deepspeed: {path} is decided by {field}")
    optimizer = str(training.deepspeed.get("optimizer", {}).get("type", "AdamW"))
    parameters: dict[str, Any] = {"lr": training.learning_rate, "weight_decay": training.weight_decay}
    if optimizer in ("Adam", "AdamW"):
        # DeepSpeed's own compile at first use: a minute on a CPU, and a CUDA toolkit on a GPU.
        parameters |= {"betas": [0.9, 0.95], "torch_adam": True}
    defaults: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": training.max_grad_norm,
        "steps_per_print": NEVER_PRINT,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": bfloat16},
        "optimizer": {"type": optimizer, "params": parameters},
        "zero_allow_untested_optimizer": True,
    }
    if bfloat16:
        # Micro-batches add up in float32: the gradient must not depend on the split.
        defaults["data_types"] = {"grad_accum_dtype": "fp32"}
    return _merged(defaults, training.deepspeed)


def _has(config: dict[str, Any], path: str) -> bool:
    head, _, rest = path.partition(".")
    value = config.get(head)
    return value is not None and (not rest or (isinstance(value, dict) and _has(value, rest)))


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for name, value in over.items():
        nested = isinstance(value, dict) and isinstance(out.get(name), dict)
        out[name] = _merged(out[name], value) if nested else value
    return out
