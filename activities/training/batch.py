"""From recorded segments to tensors: trajectories, minibatches, micro-batches. Pure; called by the update.

Promises: token ids, mask, log-probabilities, temperatures and versions are those that were recorded when the tokens
were made; rows are padded on the right with an attention mask and explicit positions; the split into minibatches
depends on seed, step and the batch alone.

Shapes: T tokens of a trajectory, B rows and T columns of a micro-batch.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workflows.contracts import UNKNOWN_EXPERT, Segment, derive_seed


@dataclass(frozen=True)
class Trajectory:
    """One episode as the trainer sees it, or one branch of it where it has several; aligned arrays of length T.
    Example: prompt 12 7, answer 40 2 at version 3::

    Trajectory("r/g0/e1/a0", "r/g0", reward=1.0, token_ids=[12, 7, 40, 2], loss_mask=[F, F, T, T],
               logprobs=[0, 0, -0.1, -0.7], temperatures=[1, 1, 1, 1], versions=[-1, -1, 3, 3])
    """

    attempt_id: str
    group_id: str
    reward: float
    token_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float64]
    temperatures: NDArray[np.float64]
    versions: NDArray[np.int64]
    experts: NDArray[np.integer[Any]] | None = None
    """Shape (T - 1, layers, experts per token): which experts all tokens but the last went through in the engine."""
    replayed: bool = False
    """An archived success that joined the group: it counts as a sibling, but not as the policy's own doing."""

    @property
    def sequence_tokens(self) -> int:
        """Prompt, tool output and sampled tokens together."""
        return len(self.token_ids)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy made: what lengths, denominators and rates are measured in."""
        return int(self.loss_mask.sum())


def trajectories(attempt_id: str, group_id: str, reward: float, segments: Sequence[Segment]) -> list[Trajectory]:
    """The branches of an episode, each with the reward of the whole: every sampled token is in one of them, after the
    ids that it was sampled after. Raises ValueError as `trajectory`."""
    branches: dict[int, list[Segment]] = {}
    for segment in segments:
        branches.setdefault(segment.branch, []).append(segment)
    return [trajectory(attempt_id, group_id, reward, branches[branch]) for branch in sorted(branches)]


def trajectory(attempt_id: str, group_id: str, reward: float, segments: Sequence[Segment]) -> Trajectory:
    """The concatenation of one branch's segments.

    Raises ValueError where the record contradicts itself: lists of different lengths, turns out of order, a mask that
    is not 0 or 1, a sampled token without a version, in first place, or with a log-probability that can't be one.
    """
    for previous, current in pairwise(segments):
        if current.turn <= previous.turn:
            raise ValueError(f"{attempt_id}: turn {current.turn} follows turn {previous.turn}")
    for segment in segments:
        lengths = {len(item) for item in (segment.token_ids, segment.loss_mask, segment.logprobs, segment.versions)}
        if len(lengths) != 1:
            raise ValueError(f"{attempt_id}: turn {segment.turn} has lists of different lengths: {sorted(lengths)}")
    mask = [item for segment in segments for item in segment.loss_mask]
    made = Trajectory(
        attempt_id=attempt_id,
        group_id=group_id,
        reward=reward,
        token_ids=np.array([item for segment in segments for item in segment.token_ids], dtype=np.int64),
        loss_mask=np.array(mask, dtype=np.bool_),
        logprobs=np.array([item for segment in segments for item in segment.logprobs], dtype=np.float64),
        temperatures=np.array(
            [segment.temperature for segment in segments for _ in segment.token_ids], dtype=np.float64
        ),
        versions=np.array([item for segment in segments for item in segment.versions], dtype=np.int64),
        experts=decoded_experts(
            attempt_id,
            [segment.routed_experts for segment in segments],
            sum(len(segment.token_ids) for segment in segments),
        ),
    )
    sampled = made.logprobs[made.loss_mask]
    if not set(mask) <= {0, 1} or not any(mask) or mask[0]:
        raise ValueError(f"{attempt_id}: the mask must be 0 or 1, 0 for the first token and 1 for some")
    if not np.isfinite(sampled).all() or (sampled > 1e-3).any():
        raise ValueError(f"{attempt_id}: a sampled token's log-probability is not finite or above 0")
    if (made.versions[made.loss_mask] < 0).any():
        raise ValueError(f"{attempt_id}: a sampled token has no policy version")
    if (made.temperatures <= 0).any():
        raise ValueError(f"{attempt_id}: training needs a temperature above 0")
    return made


def decoded_experts(attempt_id: str, segments: Sequence[str], tokens: int) -> NDArray[np.integer[Any]] | None:
    """The experts of a trajectory's tokens but the last, from what its segments record; None where one does not say.

    Raises ValueError where one can't be read, or they are not those of so many tokens."""
    if not all(segments):
        return None
    parts = [np.load(io.BytesIO(base64.b64decode(segment)), allow_pickle=False) for segment in segments]
    shapes = {part.shape[1:] for part in parts}
    if sum(map(len, parts)) != tokens - 1 or len(shapes) != 1 or parts[0].ndim != 3:
        found = ", ".join(str(part.shape) for part in parts)
        raise ValueError(f"{attempt_id}: routed experts of shape {found} are not those of {tokens} tokens")
    whole: NDArray[np.integer[Any]] = np.concatenate(parts)
    return whole


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass, padded right to the longest. `rows[b]` is the index of row b in the caller's list."""

    rows: list[int]
    token_ids_BT: torch.Tensor
    attention_mask_BT: torch.Tensor
    position_ids_BT: torch.Tensor
    loss_mask_BT: torch.Tensor
    temperature_BT: torch.Tensor
    experts_BTLK: torch.Tensor | None = None
    """UNKNOWN_EXPERT for padding, for last tokens, and for trajectories of which nothing is known."""

    @property
    def rows_N(self) -> torch.Tensor:
        """The row of each sampled token, in row-major order."""
        return self.loss_mask_BT.nonzero(as_tuple=True)[0]

    @property
    def padded_tokens(self) -> int:
        return self.token_ids_BT.numel()


def optimizer_steps(groups: int, *, full: int, minibatches: int) -> int:
    """Optimizer steps of a batch of `groups` where one of `full` groups makes `minibatches`: a batch that was cut short
    makes fewer, not smaller ones, whose gradients would be noise at the same learning rate."""
    return max(1, min(minibatches, math.ceil(minibatches * groups / full)))


def split_minibatches(count: int, minibatches: int, *, seed: int, step: int) -> list[list[int]]:
    """`range(count)` in at most `minibatches` parts whose sizes differ by one at most, shuffled by seed and step."""
    order = np.random.default_rng(derive_seed(seed, "minibatches", step)).permutation(count)
    return [part.tolist() for part in np.array_split(order, min(minibatches, count))]


def split_micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of rows per forward pass: similar lengths together, at most `budget` padded tokens. A row longer than the
    budget stands alone."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    parts: list[list[int]] = []
    for index in order:
        if parts and lengths[parts[-1][0]] * (len(parts[-1]) + 1) <= budget:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts


def pad(trajectories: Sequence[Trajectory], rows: list[int], device: torch.device | str = "cpu") -> MicroBatch:
    """The given rows of `trajectories` as tensors. Padding has id 0, mask 0 and temperature 1."""
    chosen = [trajectories[row] for row in rows]
    shape = (len(chosen), max(item.sequence_tokens for item in chosen))
    token_ids, attention, loss_mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    temperature = np.ones(shape, np.float64)
    for row, item in enumerate(chosen):
        length = item.sequence_tokens
        token_ids[row, :length] = item.token_ids
        attention[row, :length] = 1
        loss_mask[row, :length] = item.loss_mask
        temperature[row, :length] = item.temperatures
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int64), shape).copy()
    return MicroBatch(
        rows=rows,
        token_ids_BT=torch.from_numpy(token_ids).to(device),
        attention_mask_BT=torch.from_numpy(attention).to(device),
        position_ids_BT=torch.from_numpy(positions).to(device),
        loss_mask_BT=torch.from_numpy(loss_mask).to(device),
        temperature_BT=torch.from_numpy(temperature).to(device),
        experts_BTLK=_padded_experts(chosen, shape, device),
    )


def _padded_experts(
    chosen: Sequence[Trajectory], shape: tuple[int, int], device: torch.device | str
) -> torch.Tensor | None:
    known = {row: item.experts for row, item in enumerate(chosen) if item.experts is not None}
    if not known:
        return None
    experts = np.full((*shape, *next(iter(known.values())).shape[1:]), UNKNOWN_EXPERT, np.int16)
    for row, found in known.items():
        experts[row, : len(found)] = found
    return torch.from_numpy(experts).to(device)
