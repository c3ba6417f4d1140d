"""Quantizes published weights for an engine: `python -m activities.generation.quantize SOURCE FOLDER`.

`int8` is W8A8 of the compressed-tensors format, which vLLM serves on CPUs and GPUs: linear layers have int8 weights,
rounded to nearest, with one scale per output channel, the channel's largest |weight| over 127; activations are
quantized per token while they are computed. Embeddings, norms and the head stay as they are. A process of its own: it
needs torch, which the workers beside the engines do without. Called by activities/generation/quantized.py.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from activities.publication.manifest import WEIGHTS_FILE

LEVELS = 127
LEFT = ("lm_head.weight", "embed_tokens.weight")
"""Ends of the names of matrices that are looked up, or whose rounding decides between tokens."""
SCHEME: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def quantize(source: Path, folder: Path) -> None:
    """Make the Hugging Face folder `folder` from `source`, which is one; there it is whole or not at all."""
    from safetensors.torch import load_file, save_file

    making = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    weights = load_file(source / WEIGHTS_FILE)
    made = {}
    for name, tensor in weights.items():
        if tensor.dim() == 2 and name.endswith(".weight") and not name.endswith(LEFT):
            made[name], made[f"{name}_scale"] = channels(tensor)
        else:
            made[name] = tensor
    save_file(made, making / WEIGHTS_FILE, metadata={"format": "pt"})
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copyfile(path, making / path.name)
    config = json.loads((making / "config.json").read_text())
    (making / "config.json").write_text(json.dumps(config | {"quantization_config": SCHEME}, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    making.rename(folder)


def channels(weight: Any) -> tuple[Any, Any]:
    """(int8 [out, in], scale [out, 1]) of a matrix [out, in], about their product. A row of zeros has scale 1."""
    import torch

    largest = weight.float().abs().amax(dim=1, keepdim=True)
    scale = torch.where(largest > 0, largest / LEVELS, torch.ones_like(largest))
    rounded = (weight.float() / scale).round().clamp(-LEVELS, LEVELS)
    return rounded.to(torch.int8), scale.to(weight.dtype)


if __name__ == "__main__":
    quantize(Path(sys.argv[1]), Path(sys.argv[2]))
