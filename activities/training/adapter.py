"""LoRA: which weights train, and the way from an adapter back to whole tensors under the model's own names. Called by
the trainer.

Source: LoRA (arXiv 2106.09685), as PEFT builds it: W' = W + (alpha / rank) B A, where B begins as zeros.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from activities.publication import adapters
from activities.publication.adapters import CONFIG_FILE, PREFIX, TENSORS_FILE
from workflows.config import TrainingConfig
from workflows.errors import InvalidConfig

NAME = "default"


def with_adapter(model: Any, training: TrainingConfig, folder: Path) -> Any:
    """The model with all weights frozen and an adapter of `training.lora_rank` beside each of the target layers.

    Raises InvalidConfig where `training.lora_targets` names no layer of the model."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=training.lora_rank,
        lora_alpha=training.lora_alpha or 2 * training.lora_rank,
        lora_dropout=0.0,
        target_modules=training.lora_targets or "all-linear",
        task_type="CAUSAL_LM",
        base_model_name_or_path=folder.name,
    )
    tied = {id(item) for name, item in model.named_parameters() if _is_tied(model, name)}
    fits = {
        name for name, item in model.named_modules() if type(item) is torch.nn.Linear and id(item.weight) not in tied
    }
    names = ", ".join(sorted({name.rpartition(".")[2] for name in fits}))
    try:
        made = get_peft_model(model, config)
    except ValueError as error:
        raise InvalidConfig(
            f"training.lora_targets {training.lora_targets}: {error}; layers that can have an adapter: {names}"
        ) from error
    wrapped = {name.removeprefix(PREFIX) for name, item in made.named_modules() if hasattr(item, "base_layer")}
    if unfit := sorted(wrapped - fits):
        raise InvalidConfig(
            f"training.lora_targets: {unfit[0]} is no plain linear layer with a weight of its own, so no adapter of"
            f" it can be merged; layers that can have one: {names}"
        )
    return made


def _is_tied(model: Any, name: str) -> bool:
    """Whether the parameter has a second name: one that a tied table shares."""
    parameter = model.get_parameter(name)
    return sum(item is parameter for _, item in model.named_parameters(remove_duplicate=False)) > 1


def merged(state: dict[str, torch.Tensor], name: str, scale: float) -> torch.Tensor:
    """The tensor `name` of the plain model from the state of the wrapped one: its base weight, with scale B A added.
    Raises KeyError where there is none."""
    whole = PREFIX + name
    if whole in state:
        return state[whole]
    stem, _, leaf = whole.rpartition(".")
    base = state[f"{stem}.base_layer.{leaf}"]
    if leaf != "weight":
        return base
    made: torch.Tensor = adapters.merged(
        base, state[f"{stem}.lora_A.{NAME}.weight"], state[f"{stem}.lora_B.{NAME}.weight"], scale
    )
    return made


def adapter_tensors(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapter's own tensors, on the CPU, under the names by which PEFT loads them."""
    return {
        name.replace(f".{NAME}.", "."): value.detach().to("cpu").contiguous()
        for name, value in state.items()
        if f".lora_A.{NAME}." in name or f".lora_B.{NAME}." in name
    }


def save_adapter(tensors: dict[str, torch.Tensor], config: dict[str, Any], folder: Path) -> None:
    """Write PEFT's two files below a version's folder. The same adapter gives the same bytes."""
    (folder / TENSORS_FILE).parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / TENSORS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def config_of(model: Any) -> dict[str, Any]:
    """PEFT's configuration of the adapter as JSON, whose sets are sorted."""
    found = model.peft_config[NAME].to_dict() | {"inference_mode": True}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in found.items()}
