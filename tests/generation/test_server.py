from __future__ import annotations

import json
from pathlib import Path

import pytest

from activities.generation.server import FORKED, EngineSpec, command, environment, kv_cache_bytes, routes_experts
from workflows.errors import InvalidConfig

QWEN = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return tmp_path


def spec_of(model: Path, **changes: object) -> EngineSpec:
    return EngineSpec(model=str(model), context_length=512, dtype="float32").model_copy(update=changes)


def test_the_server_listens_on_loopback_alone_and_says_which_spec_it_serves(model: Path) -> None:
    spec = spec_of(model)
    words = command(spec, 9000, on="cpu")
    assert "--host=127.0.0.1" in words
    assert words[words.index("--served-model-name") + 1 :] == ["policy", spec.fingerprint]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, False),
        ({"num_experts": 0}, False),
        ({"num_experts": 8}, True),
        ({"num_local_experts": 8}, True),
        ({"text_config": QWEN | {"n_routed_experts": 8}}, True),
    ],
)
def test_an_engine_of_a_mixture_of_experts_tells_which_were_taken(
    model: Path, config: dict[str, object], told: bool
) -> None:
    (model / "config.json").write_text(json.dumps(QWEN | config))
    assert routes_experts(str(model)) is told
    assert ("--enable-return-routed-experts" in command(spec_of(model), 9000, on="cuda")) is told
    assert "--enable-return-routed-experts" not in command(spec_of(model), 9000, on="cpu")


def test_a_model_folder_made_anew_under_its_name_is_another_spec(model: Path) -> None:
    before = EngineSpec.of(str(model), context_length=64, dtype="auto")
    assert before == EngineSpec.of(str(model), context_length=64, dtype="auto")
    (model / "config.json").write_text(json.dumps(QWEN | {"hidden_size": 128}))
    assert EngineSpec.of(str(model), context_length=64, dtype="auto").fingerprint != before.fingerprint


def test_a_folder_without_a_model_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"config\.json"):
        EngineSpec.of(str(tmp_path), context_length=64, dtype="auto")


def test_the_cache_holds_every_sequence_at_full_length_within_bounds(model: Path) -> None:
    assert kv_cache_bytes(spec_of(model), "cpu") == 128 << 20
    per_token = 2 * 2 * 2 * 32 * 4
    assert kv_cache_bytes(spec_of(model, context_length=4096), "cpu") == per_token * 4096 * 128
    assert kv_cache_bytes(spec_of(model, context_length=65536), "cpu") == 2 << 30
    assert (
        kv_cache_bytes(spec_of(model, context_length=65536, dtype="bfloat16"), "cuda") == per_token // 2 * 65536 * 128
    )


def test_an_engine_on_a_cpu_box_leaves_half_its_threads_to_the_others() -> None:
    threads = [environment({}, on="cpu", cores=cores)["OMP_NUM_THREADS"] for cores in (1, 2, 16)]
    assert threads == ["1", "1", "8"]
    forked = [FORKED in environment({}, on="cpu", cores=cores) for cores in (1, 2, 16)]
    assert forked == [True, True, False], "only where no kernel has threads that a fork would lack"


def test_a_gpu_engine_gets_no_cpu_settings() -> None:
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment({}, on="cuda", cores=4)
