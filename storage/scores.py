"""The trainer's log-probabilities of a batch's tokens, one object per step, beside the segments with the engine's.

Written by the update once it has scored the batch and before it commits; read by `ratchet episode`. Each try of an
update has an object of its own, and the batch's row names the try that counts. Lists of floats, six digits.
"""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice

from pydantic import BaseModel, ConfigDict

from storage.objects import ObjectStore
from workflows.contracts import Segment

DIGITS = 6
QUICK = 1
"""Digits hardly compress: more effort of gzip brings nothing."""


class Scores(BaseModel):
    """What one step's scoring pass found. Example: `{"policy_version": 3, "logprobs": {"r/g0/e1/a0": [[-0.1, -0.7]]}}`:
    two sampled tokens of one attempt with one branch, under the weights of version 3."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy_version: int
    """Version of the weights that the step began with."""
    logprobs: dict[str, list[list[float]]]
    """By attempt, for each of its branches in order the sampled tokens' log-probabilities in nats."""


def scores_key(run: str, step: int, fence: int) -> str:
    return f"runs/{run}/scores/s{step:06d}-f{fence:04d}.json.gz"


def write_scores(store: ObjectStore, key: str, scores: Scores) -> None:
    """Put them under `key`, rounded. Raises StorageError."""
    rounded = {
        attempt: [[round(value, DIGITS) for value in branch] for branch in branches]
        for attempt, branches in scores.logprobs.items()
    }
    whole = scores.model_copy(update={"logprobs": rounded}).model_dump_json()
    store.put(key, gzip.compress(whole.encode(), QUICK, mtime=0))


def read_scores(store: ObjectStore, key: str) -> Scores:
    """Raises MissingObject where the step kept none, StorageError where the store does not answer, ValueError where it
    can't be read."""
    try:
        return Scores.model_validate_json(gzip.decompress(store.get(key)))
    except (OSError, EOFError) as error:
        raise ValueError(str(error)) from error


def by_turn(segments: Mapping[int, Segment], branches: Sequence[Sequence[float]]) -> dict[int, list[float]]:
    """The scores of each turn's sampled tokens. Raises ValueError where they are not those of these segments."""
    sampled: Counter[int] = Counter()
    for segment in segments.values():
        sampled[segment.branch] += sum(segment.loss_mask)
    expected, found = [sampled[branch] for branch in sorted(sampled)], [len(branch) for branch in branches]
    if expected != found:
        raise ValueError(f"scores of {found} tokens are not those of {expected}")
    rest = dict(zip(sorted(sampled), map(iter, branches), strict=True))
    return {
        turn: list(islice(rest[segment.branch], sum(segment.loss_mask))) for turn, segment in sorted(segments.items())
    }
