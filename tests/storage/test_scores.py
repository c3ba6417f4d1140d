"""The trainer's log-probabilities of a batch, kept and found again."""

from __future__ import annotations

import gzip

import pytest

from storage.objects import MissingObject, ObjectStore
from storage.scores import Scores, by_turn, read_scores, scores_key, write_scores
from workflows.contracts import FinishReason, Segment


def segment(turn: int, sampled: int, branch: int = 0) -> Segment:
    return Segment(
        turn=turn,
        branch=branch,
        token_ids=[1] * (2 + sampled),
        loss_mask=[0, 0] + [1] * sampled,
        logprobs=[0.0] * (2 + sampled),
        versions=[-1, -1] + [3] * sampled,
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        text="",
        engine="e0",
    )


def test_what_is_kept_is_found_again_to_six_digits(object_store: ObjectStore) -> None:
    key = scores_key("r", 12, 2)
    assert key == "runs/r/scores/s000012-f0002.json.gz"
    write_scores(object_store, key, Scores(policy_version=11, logprobs={"r/g0/e0/a0": [[-0.12345678], [-1, -2.5]]}))
    assert read_scores(object_store, key).model_dump() == {
        "policy_version": 11,
        "logprobs": {"r/g0/e0/a0": [[-0.123457], [-1.0, -2.5]]},
    }


def test_the_same_scores_are_the_same_object(object_store: ObjectStore) -> None:
    for key in ("one", "other"):
        write_scores(object_store, key, Scores(policy_version=1, logprobs={"a": [[-0.5]]}))
    assert object_store.get("one") == object_store.get("other")


@pytest.mark.parametrize(
    "data",
    [b"no gzip", gzip.compress(b"{"), gzip.compress(b'{"logprobs": {}}')],
    # gzip writes the time into its header: processes that began in two seconds would not agree on the tests' names.
    ids=["no_gzip", "no_json", "no_scores"],
)
def test_an_object_that_cannot_be_read_is_a_value_error(object_store: ObjectStore, data: bytes) -> None:
    object_store.put("damaged", data)
    with pytest.raises(ValueError):
        read_scores(object_store, "damaged")
    with pytest.raises(ValueError):
        object_store.put("cut", gzip.compress(b'{"policy_version": 1, "logprobs": {}}')[:-6])
        read_scores(object_store, "cut")
    with pytest.raises(MissingObject):
        read_scores(object_store, "nowhere")


def test_each_turns_tokens_get_the_scores_of_their_branch_in_order() -> None:
    segments = {0: segment(0, 2), 1: segment(1, 1, branch=4), 2: segment(2, 3), 3: segment(3, 1, branch=4)}
    assert by_turn(segments, [[-1, -2, -3, -4, -5], [-6, -7]]) == {0: [-1, -2], 1: [-6], 2: [-3, -4, -5], 3: [-7]}


@pytest.mark.parametrize("branches", [[], [[-1]], [[-1, -2, -3]], [[-1, -2], [-3]]])
def test_scores_of_other_tokens_are_refused(branches: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="are not those of"):
        by_turn({0: segment(0, 2)}, branches)
