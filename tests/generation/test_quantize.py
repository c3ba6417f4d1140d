"""int8 weights of a published version: what is quantized, how far it is from the original, and whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from activities.generation.quantize import channels, quantize


def source(folder: Path, dtype: torch.dtype) -> Path:
    folder.mkdir()
    draw = torch.Generator().manual_seed(4)
    weights = {
        "model.embed_tokens.weight": torch.randn(20, 8, generator=draw),
        "model.layers.0.mlp.up_proj.weight": torch.randn(12, 8, generator=draw),
        "model.norm.weight": torch.ones(8),
        "lm_head.weight": torch.randn(20, 8, generator=draw),
    }
    save_file({name: tensor.to(dtype) for name, tensor in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_layers_are_quantized_and_all_else_stays(tmp_path: Path, dtype: torch.dtype) -> None:
    made = source(tmp_path / "source", dtype)
    quantize(made, tmp_path / "int8")
    before, after = (load_file(folder / "model.safetensors") for folder in (made, tmp_path / "int8"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert after.keys() == before.keys() | {f"{name}_scale"}
    assert after[name].dtype == torch.int8 and after[f"{name}_scale"].shape == (12, 1)
    assert all(torch.equal(after[other], before[other]) for other in before.keys() - {name})
    config = json.loads((tmp_path / "int8" / "config.json").read_text())
    assert config["hidden_size"] == 8 and config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert (tmp_path / "int8" / "tokenizer.json").read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["int8", "source"]


def test_a_weight_is_at_most_half_a_level_off() -> None:
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    rounded, scale = channels(weight)
    assert ((rounded * scale - weight).abs() <= scale / 2 + 1e-6).all()
    assert rounded.abs().max() == 127 and (rounded[3] == 0).all() and scale[3] == 1


def test_what_an_earlier_try_left_is_made_anew(tmp_path: Path) -> None:
    made = source(tmp_path / "source", torch.float32)
    (tmp_path / "int8.part").mkdir()
    (tmp_path / "int8.part" / "junk").touch()
    for _ in range(2):
        quantize(made, tmp_path / "int8")
    assert not (tmp_path / "int8" / "junk").exists()
