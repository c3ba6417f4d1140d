"""Trajectories, padding and the splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from activities.training.batch import (
    optimizer_steps,
    pad,
    split_micro_batches,
    split_minibatches,
    trajectories,
    trajectory,
)
from activities.training.update import advantages_of
from tests.training.worlds import segments_of
from workflows.config import RunConfig
from workflows.contracts import FinishReason, Segment


def segment(**changes: Any) -> Segment:
    base: dict[str, Any] = {
        "turn": 0,
        "token_ids": [1, 2, 3, 4, 5, 6, 7],
        "loss_mask": [0, 0, 0, 1, 1, 1, 1],
        "logprobs": [0.0, 0.0, 0.0, -0.1, -0.2, -0.3, -0.4],
        "versions": [-1, -1, -1, 2, 2, 3, 3],
        "temperature": 0.7,
        "finish_reason": FinishReason.STOP,
        "text": "",
        "engine": "e",
    }
    return Segment(**(base | changes))


TOOL_AND_ANSWER = {
    "turn": 1,
    "token_ids": [9] * 8,
    "loss_mask": [0, 0, 0, 1, 1, 1, 1, 1],
    "logprobs": [0.0] * 3 + [-1.0] * 5,
    "versions": [-1] * 3 + [3] * 5,
    "temperature": 1.1,
}


def test_each_branch_of_an_episode_is_a_trajectory_and_every_sampled_token_is_in_one_of_them() -> None:
    forked = {"turn": 2, "branch": 1, "token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9], "loss_mask": [0] * 8 + [1]}
    fork = segment(**forked, logprobs=[0.0] * 8 + [-0.5], versions=[-1] * 8 + [3])
    segments = [segment(), fork, segment(**(TOOL_AND_ANSWER | {"turn": 3}))]
    whole, branch = trajectories("a", "g", 1.0, segments)
    assert whole.token_ids.tolist() == [*segments[0].token_ids, *segments[2].token_ids]
    assert branch.token_ids.tolist() == fork.token_ids
    assert whole.sampled_tokens + branch.sampled_tokens == sum(sum(item.loss_mask) for item in segments)
    assert (branch.attempt_id, branch.reward) == ("a", 1.0)


def test_an_episode_of_several_branches_is_one_sibling() -> None:
    config = RunConfig(model="m")
    branches = trajectories("a", "g", 1.0, [segment(), segment(turn=1, branch=1)])
    advantages = advantages_of([*branches, trajectory("b", "g", 0.0, [segment()])], config)
    assert set(advantages) == {"a", "b"} and advantages["a"] == -advantages["b"] > 0


def test_only_sampled_tokens_are_under_the_mask_and_lengths_come_from_it() -> None:
    """Prompt 3, model 4, tool 3, model 5: 9 sampled tokens of 15."""
    item = trajectory("a", "g", 1.0, [segment(), segment(**TOOL_AND_ANSWER)])
    assert (item.sampled_tokens, item.sequence_tokens) == (9, 15)
    assert item.versions[item.loss_mask].tolist() == [2, 2, 3, 3, 3, 3, 3, 3, 3]
    assert item.temperatures.tolist() == [0.7] * 7 + [1.1] * 8


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"logprobs": [0.0]}, "different lengths"),
        ({"loss_mask": [0, 0, 0, 2, 1, 1, 1]}, "mask must be 0 or 1"),
        ({"loss_mask": [1, 0, 0, 1, 1, 1, 1]}, "0 for the first token"),
        ({"loss_mask": [0] * 7}, "1 for some"),
        ({"versions": [-1] * 7}, "no policy version"),
        ({"logprobs": [0.0] * 3 + [0.5, -1, -1, -1]}, "above 0"),
        ({"logprobs": [0.0] * 3 + [float("-inf"), -1, -1, -1]}, "not finite"),
        ({"temperature": 0.0}, "temperature above 0"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        trajectory("a", "g", 1.0, [segment(**changes)])


def test_turns_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="turn 0 follows turn 1"):
        trajectory("a", "g", 1.0, [segment(**TOOL_AND_ANSWER), segment()])


def test_rows_are_padded_on_the_right_with_mask_and_positions() -> None:
    items = [trajectory("a", "g", 1.0, [segment()]), trajectory("b", "g", 0.0, [segment(), segment(**TOOL_AND_ANSWER)])]
    micro = pad(items, [0, 1])
    assert micro.token_ids_BT[0].tolist() == [1, 2, 3, 4, 5, 6, 7] + [0] * 8
    assert micro.attention_mask_BT.sum(1).tolist() == [7, 15]
    assert micro.position_ids_BT.tolist() == [list(range(15))] * 2
    assert micro.loss_mask_BT.sum(1).tolist() == [4, 9]


def test_padded_and_alone_a_row_has_the_same_logprobs(policy: Path) -> None:
    from transformers import AutoModelForCausalLM

    from activities.training.logprobs import sampled_logprobs

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    rng = np.random.default_rng(3)
    items = [trajectory(str(index), "g", 0.0, segments_of(rng)) for index in range(4)]

    def logprobs(rows: list[int]) -> list[float]:
        micro = pad(items, rows)
        with torch.no_grad():
            logits = model(
                input_ids=micro.token_ids_BT,
                attention_mask=micro.attention_mask_BT,
                position_ids=micro.position_ids_BT,
            ).logits
        values: list[float] = sampled_logprobs(logits, micro.token_ids_BT, micro.loss_mask_BT, micro.temperature_BT)[
            0
        ].tolist()
        return values

    alone = [value for row in range(4) for value in logprobs([row])]
    assert logprobs([0, 1, 2, 3]) == pytest.approx(alone, abs=1e-5)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 1000))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    parts = split_micro_batches(lengths, budget)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or max(lengths[row] for row in part) * len(part) <= budget


@given(st.integers(1, 100), st.integers(1, 16), st.integers(0, 2**31 - 1), st.integers(1, 1000))
def test_minibatches_depend_on_seed_and_step_alone(count: int, parts: int, seed: int, step: int) -> None:
    split = split_minibatches(count, parts, seed=seed, step=step)
    assert split == split_minibatches(count, parts, seed=seed, step=step)
    assert sorted(row for part in split for row in part) == list(range(count))
    assert len(split) == min(parts, count)
    assert max(map(len, split)) - min(map(len, split)) <= 1


@pytest.mark.parametrize(
    ("groups", "expected"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (6, 3), (7, 4), (8, 4), (9, 4)]
)
def test_a_batch_that_was_cut_short_makes_fewer_steps_not_smaller_ones(groups: int, expected: int) -> None:
    assert optimizer_steps(groups, full=8, minibatches=4) == expected


def test_another_step_shuffles_otherwise() -> None:
    assert split_minibatches(64, 2, seed=0, step=1) != split_minibatches(64, 2, seed=0, step=2)
