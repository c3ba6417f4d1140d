"""From the trainer to a Hugging Face folder that an engine loads, and the canary by which it proves that it did.

Promises: what is exported is the model's whole list of tensors, each of the right name, shape and dtype and finite;
tokenizer and configuration are the model's own. Called by `publish`, in the trainer's thread.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from activities.publication.manifest import WEIGHTS_FILE, Canary, TensorInfo
from activities.training.adapter import save_adapter
from activities.training.batch import MicroBatch
from activities.training.engine import Trainer
from activities.training.ranks import everywhere
from workflows.contracts import derive_seed
from workflows.errors import TrainerError

CANARY_TOKENS = 48
COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
LEFT_OUT = ("*.safetensors.index.json", "*.bin.index.json", "trainer_state.json")


def export_folder(trainer: Trainer, folder: Path) -> None:
    """Write weights, configuration and tokenizer files into `folder`, and below it the adapter where one trains; the
    weights are whole all the same, so that an engine needs to know nothing of it. Raises TrainerError (final) for wrong
    tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = everywhere(Trainer.weights, trainer)
    check_tensors(weights, trainer.tensors)
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    if trainer.adapter_config:
        save_adapter(everywhere(Trainer.adapter, trainer), trainer.adapter_config, folder)
    for pattern in COPIED:
        for path in sorted(trainer.folder.glob(pattern)):
            if path.is_file() and not any(path.match(other) for other in LEFT_OUT):
                shutil.copyfile(path, folder / path.name)
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(trainer.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def check_tensors(weights: dict[str, torch.Tensor], expected: Sequence[TensorInfo]) -> None:
    """Names both ways, then shape, dtype and finite values of each. Raises TrainerError (final) with all faults."""
    listed = {item.name: item for item in expected}
    faults = [f"{name} is missing" for name in sorted(listed.keys() - weights.keys())]
    faults += [f"{name} is not the model's" for name in sorted(weights.keys() - listed.keys())]
    for name in sorted(listed.keys() & weights.keys()):
        tensor, info = weights[name], listed[name]
        if list(tensor.shape) != info.shape:
            faults.append(f"{name} has shape {list(tensor.shape)}, not {info.shape}")
        elif str(tensor.dtype) != f"torch.{info.dtype}":
            faults.append(f"{name} is {tensor.dtype}, not {info.dtype}")
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            faults.append(f"{name} has values that are not finite")
    if faults:
        raise TrainerError(f"these weights can't be published: {'; '.join(faults)}", retryable=False)


def canary(trainer: Trainer, *, seed: int, vocabulary: int) -> Canary:
    """Fixed token ids from the run's seed and the trainer's log-probabilities of them at temperature 1, in float32."""
    ids = np.random.default_rng(derive_seed(seed, "canary", vocabulary)).integers(0, vocabulary, CANARY_TOKENS)
    token_ids_BT = torch.from_numpy(ids[None, :].astype(np.int64)).to(trainer.device)
    mask_BT = torch.ones_like(token_ids_BT, dtype=torch.bool)
    mask_BT[:, 0] = False
    micro = MicroBatch(
        rows=[0],
        token_ids_BT=token_ids_BT,
        attention_mask_BT=torch.ones_like(token_ids_BT),
        position_ids_BT=torch.arange(CANARY_TOKENS, device=trainer.device)[None, :],
        loss_mask_BT=mask_BT,
        temperature_BT=torch.ones_like(token_ids_BT, dtype=torch.float64),
    )
    logprobs_N, _ = everywhere(Trainer.frozen_logprobs, trainer, micro)
    return Canary(token_ids=ids.tolist(), logprobs=[0.0, *logprobs_N.float().cpu().tolist()])


def known_vocabulary(trainer: Trainer) -> int:
    """Ids below this are in the model's vocabulary and, where the folder has a tokenizer, in the tokenizer's too: an
    engine refuses others."""
    path = trainer.folder / "tokenizer.json"
    if not path.is_file():
        return trainer.vocab_size
    from tokenizers import Tokenizer

    return min(trainer.vocab_size, int(Tokenizer.from_file(str(path)).get_vocab_size()))
