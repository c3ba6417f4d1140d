"""Checksums that add up: what they see, and which parameters of an engine they can be compared with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from activities.publication.checksums import added, checksum, checksums_of_file, sources

F32 = "torch.float32"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (64, 33)])
def test_every_changed_bit_shows(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(1, 1 + max(1, torch.Size(shape).numel())).to(dtype).reshape(shape)
    whole = checksum(tensor)
    octets = tensor.reshape(-1).view(torch.uint8)
    for place in {0, len(octets) // 2, len(octets) - 1}:
        for bit in range(8):
            octets[place] ^= 1 << bit
            assert checksum(octets.view(dtype).reshape(shape)) != whole
            octets[place] ^= 1 << bit
    assert checksum(tensor) == whole


def test_what_is_fused_has_the_sum_of_its_parts_and_zeros_add_nothing() -> None:
    q, k, v = (torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows)) for rows in (8, 4, 4))
    assert added(map(checksum, (q, k, v))) == checksum(torch.cat([q, k, v]))
    assert checksum(torch.cat([q, torch.zeros(3, 6)])) == checksum(q)
    assert added(["f" * 16, f"{1:016x}"]) == "0" * 16, "modulo 2^64"
    assert checksum(torch.empty(0, 3)) == "0" * 16


def test_a_view_has_the_checksum_of_what_it_shows() -> None:
    table = torch.arange(21, dtype=torch.bfloat16).view(3, 7)
    assert checksum(table[1:, 2:]) == checksum(table[1:, 2:].clone())
    assert checksum(table.t()) == checksum(table.t().contiguous())
    assert checksum(torch.arange(9, dtype=torch.bfloat16)[3:]) == checksum(torch.arange(3, 9, dtype=torch.bfloat16))


def test_a_files_tensors_have_the_checksums_that_they_have_in_memory(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(5, 3), "b": torch.arange(7, dtype=torch.bfloat16), "c": torch.tensor(2.0)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"odd": "x" * 3})
    assert checksums_of_file(tmp_path / "x.safetensors") == {name: checksum(item) for name, item in tensors.items()}


GIVEN = {
    "model.embed_tokens.weight": (1000, F32),
    "model.norm.weight": (10, "torch.bfloat16"),
    "model.layers.0.self_attn.q_proj.weight": (64, F32),
    "model.layers.0.self_attn.k_proj.weight": (32, F32),
    "model.layers.0.self_attn.v_proj.weight": (32, F32),
    "model.layers.0.self_attn.q_proj.bias": (3, F32),
    "model.layers.0.self_attn.k_proj.bias": (1, F32),
    "model.layers.0.self_attn.v_proj.bias": (1, F32),
    "bare": (3, F32),
}
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
ATTENTION = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("parameter", "size", "dtype", "expected"),
    [
        ("model.embed_tokens.weight", 1000, F32, ["model.embed_tokens.weight"]),
        ("model.embed_tokens.weight", 1024, F32, ["model.embed_tokens.weight"]),
        ("model.embed_tokens.weight", 500, F32, []),
        ("model.norm.weight", 10, F32, []),
        (f"{ATTENTION}.qkv_proj.weight", 128, F32, [f"{ATTENTION}.{part}_proj.weight" for part in "qkv"]),
        (f"{ATTENTION}.qkv_proj.weight", 64, F32, []),
        (f"{ATTENTION}.qkv_proj.bias", 5, F32, []),
        ("model.layers.1.self_attn.qkv_proj.weight", 128, F32, []),
        ("model.layers.0.mlp.experts.w13_weight", 128, F32, []),
        ("bare", 3, F32, ["bare"]),
    ],
)
def test_a_parameter_is_compared_where_it_holds_whole_tensors_and_nothing_else(
    parameter: str, size: int, dtype: str, expected: list[str]
) -> None:
    """Not where it is cut between devices, cast, made of parts that are not whole words, or unknown."""
    assert sources(parameter, size, dtype, GIVEN, PACKED) == expected
