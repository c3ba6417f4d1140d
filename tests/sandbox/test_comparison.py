"""The pure parts of a replay: digests, comparison, observations read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from activities.generation.harness import observation_message
from activities.generation.transcript import Template
from activities.replay.comparison import Ending, Match, compare
from activities.replay.recorded import observed
from activities.sandbox.channel import Result
from activities.sandbox.commands import agent_operation, output_digest
from tests.generation.policies import CHATML, THINKING, make_tokenizer
from workflows.contracts import FinishReason, Segment

DONE = Result(0, None, False, 0, 0.1, 6, b"hello\n", b"")


def test_a_digest_is_over_the_ending_and_the_output_and_not_over_time_or_place() -> None:
    same = [replace(DONE, seconds=9.0, replayed=True, pids=7, pids_hits=2), replace(DONE, head=b"hel", tail=b"lo\n")]
    assert {output_digest(result) for result in same} == {output_digest(DONE)}
    others = [
        replace(DONE, exit_code=1),
        replace(DONE, exit_code=None, signal=9),
        replace(DONE, exit_code=None, timed_out=True),
        replace(DONE, head=b"hullo\n"),
        replace(DONE, total_bytes=7),
    ]
    assert len({output_digest(result) for result in [DONE, *others]}) == 6


def test_a_replay_keeps_a_turns_key_and_cap() -> None:
    made = [agent_operation("t3", "ls", timeout_s=limit, max_output_chars=100) for limit in (1, 2)]
    assert made[0].key == made[1].key and made[0].cap_bytes == made[1].cap_bytes == 408


@pytest.mark.parametrize(
    ("recorded", "replayed", "match", "note"),
    [
        (Ending(exit_code=0, digest="a"), Ending(exit_code=0, digest="a"), Match.AGREES, ""),
        (Ending(exit_code=0, digest="a"), Ending(exit_code=0, digest="b"), Match.DIFFERS, "output differs"),
        (Ending(exit_code=0, digest="a"), Ending(exit_code=1, digest="b"), Match.DIFFERS, "ended otherwise"),
        (Ending(digest="a"), Ending(digest="a"), Match.AGREES, ""),
        (Ending(digest="a"), Ending(exit_code=0, digest="b"), Match.DIFFERS, "ended otherwise"),
        (Ending(timed_out=True, digest="a"), Ending(timed_out=True, digest="a"), Match.AGREES, ""),
        (Ending(timed_out=True, digest="a"), Ending(timed_out=True, digest="b"), Match.AGREES, "by its time-out"),
        (Ending(timed_out=True, digest="a"), Ending(exit_code=0, digest="b"), Match.DIFFERS, "ended otherwise"),
        (Ending(exit_code=0, digest="a"), Ending(timed_out=True, digest="b"), Match.DIFFERS, "ended otherwise"),
        (Ending(exit_code=2), Ending(exit_code=2, digest="b"), Match.AGREES, "only its exit code"),
        (Ending(exit_code=2), Ending(exit_code=0, digest="b"), Match.DIFFERS, "ended otherwise"),
        (Ending(), Ending(exit_code=0, digest="b"), Match.UNRECORDED, "not recorded"),
    ],
)
def test_endings_are_compared_by_rule(recorded: Ending, replayed: Ending, match: Match, note: str) -> None:
    found, said = compare(recorded, replayed)
    assert found is match and note in said and bool(said) is bool(note)


@pytest.mark.parametrize("template", [CHATML, THINKING], ids=["chatml", "thinking"])
@pytest.mark.parametrize("ended", [True, False], ids=["ended", "cut"])
@pytest.mark.parametrize("text", ["plum", "(exit 1)", "two\n\nlines: cat ä", "a", "0 b", " <|im_end|> user"])
def test_an_observation_is_read_back_from_the_tokens_that_showed_it(
    template: str, ended: bool, text: str, tmp_path: Path
) -> None:
    make_tokenizer(template, eos="<|im_end|>").save_pretrained(tmp_path)
    loaded = Template.load(str(tmp_path))
    last = loaded.end_of_turn if ended else 70
    answer = _segment([65, last], sampled=2)
    following = _segment([*loaded.continuation(last, observation_message(text)), 65, 66], sampled=2)
    # A special token in an output is one of the prompt too, and no text.
    assert observed(loaded, answer, following) == text.replace("<|im_end|>", "")


def _segment(token_ids: list[int], *, sampled: int) -> Segment:
    prompted = len(token_ids) - sampled
    return Segment(
        turn=0,
        token_ids=token_ids,
        loss_mask=[0] * prompted + [1] * sampled,
        logprobs=[0.0] * len(token_ids),
        versions=[-1] * prompted + [0] * sampled,
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        text="",
        engine="e",
    )
