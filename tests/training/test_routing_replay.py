"""Mixture of experts: the trainer's routers choose what the engine's chose, and nothing else about them changes."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from activities.training.batch import decoded_experts, pad, trajectory
from activities.training.engine import Trainer
from activities.training.routing_replay import RoutingReplay
from tests.generation.policies import save_mixture
from tests.training.test_batch import TOOL_AND_ANSWER, segment
from workflows.config import TrainingConfig
from workflows.contracts import UNKNOWN_EXPERT
from workflows.errors import TrainerError

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "eos_token_id": 1,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPED = {"n_routed_experts": 8, "n_group": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 0} | LATENT
ONE_TOP_K = {
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True},
    "Qwen2Moe": {"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "Mixtral": {"num_local_experts": 8},
    "Olmoe": {"num_experts": 8},
    "DeepseekV3": GROUPED | {"topk_group": 1},
}
IDS = torch.arange(20).reshape(2, 10)


def model(name: str, sizes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **sizes)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def routers(made: Any) -> list[Any]:
    return [module for module in made.modules() if type(module).__name__.lower().endswith("topkrouter")]


def watched(made: Any) -> Callable[[], torch.Tensor]:
    """What the routers chose in the last forward pass [B, T, L, K]."""
    seen: dict[int, torch.Tensor] = {}
    for layer, router in enumerate(routers(made)):
        router.register_forward_hook(lambda _, __, out, layer=layer: seen.__setitem__(layer, out[2]))
    return lambda: torch.stack([seen[layer].view(*IDS.shape, -1) for layer in sorted(seen)], 2)


@pytest.mark.parametrize("name", ONE_TOP_K)
def test_the_routers_take_the_given_experts_and_their_own_where_none_are_known(name: str) -> None:
    made = model(name, ONE_TOP_K[name])
    replay, chosen = RoutingReplay(made), watched(made)
    assert replay.layers == 2
    plain, own = made(IDS).logits, chosen()
    replay.take(own)
    assert torch.equal(made(IDS).logits, plain)
    replay.take((own + 3) % 8)
    other = made(IDS).logits
    assert torch.equal(chosen(), (own + 3) % 8) and not torch.allclose(other, plain)
    some = own.clone()
    some[0, 4:] = UNKNOWN_EXPERT
    replay.take(some)
    assert torch.equal(made(IDS).logits, plain)
    replay.take(None)
    assert torch.equal(made(IDS).logits, plain)


def test_the_chosen_experts_count_what_the_trainers_scores_say_and_pass_a_gradient_on() -> None:
    made = model("Qwen3Moe", ONE_TOP_K["Qwen3Moe"])
    replay, router = RoutingReplay(made), routers(made)[0]
    hidden_NH, given_NK = torch.randn(5, 32), torch.tensor([[7, 0], [1, 2], [3, 4], [5, 6], [0, 1]])
    replay.take(given_NK[None, :, None, :])
    _, scores_NK, indices_NK = router(hidden_NH)
    expected_NK = torch.softmax(hidden_NH @ router.weight.T, -1).gather(-1, given_NK)
    assert torch.equal(indices_NK, given_NK)
    torch.testing.assert_close(scores_NK, expected_NK / expected_NK.sum(-1, keepdim=True))
    scores_NK[:, 0].sum().backward()
    assert router.weight.grad.abs().sum() > 0


def test_a_recomputed_forward_pass_takes_them_too() -> None:
    gradients = []
    for checkpointing in (False, True):
        made = model("Qwen3Moe", ONE_TOP_K["Qwen3Moe"]).train()
        if checkpointing:
            made.gradient_checkpointing_enable({"use_reentrant": False})
        replay = RoutingReplay(made)
        replay.take(torch.arange(2).expand(2, 10, 2, 2))
        made(IDS).logits.logsumexp(-1).sum().backward()
        gradients.append(routers(made)[0].weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_router_that_takes_as_many_groups_as_experts_is_refused_with_the_way_out() -> None:
    """Which of its two choices is which can't be told."""
    made = model("DeepseekV3", GROUPED | {"topk_group": 2})
    RoutingReplay(made).take(torch.zeros(2, 10, 2, 2, dtype=torch.int64))
    with pytest.raises(TrainerError, match=r"set training\.replay_routing to false"):
        made(IDS)


# --- from the record to the tensors -------------------------------------------------------------------------------


def recorded(tokens: int, first: int, *, layers: int = 2, experts: int = 3) -> str:
    """Experts of so many tokens, numbered from `first` on."""
    buffer = io.BytesIO()
    values = np.arange(first, first + tokens, dtype=np.uint8)
    np.save(buffer, np.broadcast_to(values[:, None, None], (tokens, layers, experts)))
    return base64.b64encode(buffer.getvalue()).decode()


def test_the_turns_experts_are_those_of_all_tokens_but_the_last() -> None:
    """Seven tokens, of which the last went through no layer in its own turn; then eight."""
    segments = [segment(routed_experts=recorded(6, 0)), segment(**TOOL_AND_ANSWER, routed_experts=recorded(8, 6))]
    item = trajectory("a", "g", 1.0, segments)
    assert item.experts is not None and item.experts.shape == (14, 2, 3)
    assert item.experts[:, 1, 2].tolist() == list(range(14))
    short = trajectory("b", "g", 0.0, [segment(routed_experts=recorded(6, 40))])
    dense = trajectory("c", "g", 0.0, [segment()])
    experts_BTLK = pad([item, short, dense], [0, 1, 2]).experts_BTLK
    assert experts_BTLK is not None and experts_BTLK.shape == (3, 15, 2, 3)
    assert experts_BTLK[:, :, 0, 0].tolist() == [
        [*range(14), UNKNOWN_EXPERT],
        [*range(40, 46), *[UNKNOWN_EXPERT] * 9],
        [UNKNOWN_EXPERT] * 15,
    ]
    assert pad([dense], [0]).experts_BTLK is None


def test_a_turn_that_does_not_say_leaves_the_trajectory_to_the_trainers_own_choice() -> None:
    assert (
        trajectory("a", "g", 1.0, [segment(routed_experts=recorded(6, 0)), segment(**TOOL_AND_ANSWER)]).experts is None
    )


@pytest.mark.parametrize("tokens", [5, 7])
def test_experts_of_other_tokens_are_a_contradiction(tokens: int) -> None:
    with pytest.raises(ValueError, match=r"a: routed experts of shape \(\d, 2, 3\) are not those of 7 tokens"):
        decoded_experts("a", [recorded(tokens, 0)], 7)


# --- under the trainer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [{}, {"lora_rank": 4, "lora_targets": ["q_proj", "v_proj"]}])
def test_a_mixtures_weights_are_published_under_the_names_of_its_files(
    training: dict[str, Any], tmp_path: Path
) -> None:
    save_mixture(tmp_path, seed=0)
    files = load_file(tmp_path / "model.safetensors")
    trainer = Trainer(tmp_path, TrainingConfig.model_validate(training), seed=0)
    weights = trainer.weights()
    trainer.close()
    assert "model.layers.1.mlp.experts.15.down_proj.weight" in files
    assert weights.keys() == files.keys() == {item.name for item in trainer.tensors}
    assert all(torch.equal(weights[name], value) for name, value in files.items())


def test_the_trainer_takes_a_trajectorys_experts_unless_it_is_told_not_to(tmp_path: Path) -> None:
    save_mixture(tmp_path, seed=0)
    sampled = segment(routed_experts=recorded(6, 0, layers=2, experts=4))
    known, unknown = trajectory("a", "g", 1.0, [sampled]), trajectory("a", "g", 1.0, [segment()])
    found = {}
    for replay in (True, False):
        trainer = Trainer(tmp_path, TrainingConfig(replay_routing=replay), seed=0)
        for name, item in (("known", known), ("unknown", unknown)):
            found[replay, name] = trainer.frozen_logprobs(pad([item], [0]))[0]
        trainer.close()
    assert torch.equal(found[True, "unknown"], found[False, "unknown"])
    assert torch.equal(found[False, "known"], found[False, "unknown"])
    assert not torch.allclose(found[True, "known"], found[True, "unknown"])
