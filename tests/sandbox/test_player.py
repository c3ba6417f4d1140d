"""Recorded attempts played again in real sandboxes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import Engine

from activities.replay.comparison import Match
from activities.replay.player import KIND, Played, PlayedTurn, Player
from activities.sandbox.docker import DockerBackend
from activities.sandbox.image import ImageGone
from storage.objects import MissingObject, ObjectStore
from tasksets import open_taskset
from tests.sandbox.attempts import Recorder
from workflows.contracts import Outcome, StopReason

pytestmark = pytest.mark.docker

SOLVE = ("cat /data/word", "cat /data/word > out\necho written")
RANDOM = "cat /proc/sys/kernel/random/uuid"


@pytest.fixture
def recorder(backend: DockerBackend, database: Engine, object_store: ObjectStore, tmp_path: Path) -> Recorder:
    return Recorder(backend, database, object_store, tmp_path)


def player(recorder: Recorder, backend: DockerBackend, attempt: str) -> Player:
    return Player(backend, recorder.recorded(attempt), open_taskset(str(recorder.taskset)).load("write"))


async def replayed(recorder: Recorder, backend: DockerBackend, attempt: str, *, go_on: bool = False) -> Played:
    played = await player(recorder, backend, attempt).play(go_on=go_on, show=lambda _: None)
    assert await backend._names({"ratchet.kind": KIND}) == set(), "a sandbox was left"
    return played


def matches(played: Played) -> list[Match]:
    return [turn.match for turn in played.turns]


async def test_an_attempt_that_depends_on_nothing_else_agrees_in_every_turn_and_in_its_reward(
    recorder: Recorder, backend: DockerBackend
) -> None:
    attempt = await recorder.play(*SOLVE, "ls nowhere", "kill -TERM $$")
    played = await replayed(recorder, backend, attempt)
    assert played.agrees and matches(played) == [Match.AGREES] * 4
    assert [turn.command for turn in played.turns][:2] == list(SOLVE)
    assert [turn.recorded.exit_code for turn in played.turns] == [0, 0, 1, None]
    assert played.verdict is not None and (played.verdict.recorded, played.verdict.replayed) == (1.0, 1.0)


async def test_commands_are_whole_however_short_their_row_cuts_them(recorder: Recorder, backend: DockerBackend) -> None:
    command = f"echo {'x' * 900} | wc -c\ncat /data/word > out"
    played = await replayed(recorder, backend, await recorder.play(command))
    assert played.agrees and played.turns[0].command == command


async def test_the_first_output_that_differs_is_shown_beside_the_recorded_one_and_ends_it(
    recorder: Recorder, backend: DockerBackend
) -> None:
    attempt = await recorder.play("cat /data/word", f"echo same; {RANDOM}", "echo never reached")
    shown: list[PlayedTurn] = []
    played = await player(recorder, backend, attempt).play(go_on=False, show=shown.append)
    assert not played.agrees and matches(played) == [Match.AGREES, Match.DIFFERS]
    assert shown == played.turns and played.verdict is None and "turn 1 differs" in played.stopped
    turn = played.turns[1]
    assert turn.recorded_output is not None and turn.replayed_output is not None
    recorded, again = turn.recorded_output.splitlines(), turn.replayed_output.splitlines()
    assert recorded[0] == again[0] == "same"
    assert len(recorded) == len(again) == 2 and len(recorded[1]) == len(again[1]) == 36 and recorded[1] != again[1]


async def test_all_goes_on_after_a_difference_and_grades(recorder: Recorder, backend: DockerBackend) -> None:
    attempt = await recorder.play(RANDOM, *SOLVE)
    played = await replayed(recorder, backend, attempt, go_on=True)
    assert matches(played) == [Match.DIFFERS, Match.AGREES, Match.AGREES] and not played.agrees
    assert played.verdict is not None and played.verdict.agrees


async def test_a_difference_that_no_later_turn_shows_has_its_digests_alone(
    recorder: Recorder, backend: DockerBackend
) -> None:
    attempt = await recorder.play(RANDOM, answer="", stop_reason=StopReason.MAX_TURNS)
    (turn,) = (await replayed(recorder, backend, attempt)).turns
    assert turn.match is Match.DIFFERS and turn.recorded_output is None and turn.replayed_output
    assert len({turn.recorded.digest, turn.replayed.digest, ""}) == 3


async def test_a_command_that_times_out_again_agrees_however_far_it_got(
    recorder: Recorder, backend: DockerBackend
) -> None:
    attempt = await recorder.play(f"{RANDOM}; sleep 60", "cat /data/word > out")
    played = await replayed(recorder, backend, attempt)
    assert played.agrees and played.turns[0].recorded.timed_out
    assert "by its time-out differs" in played.turns[0].note


async def test_a_command_that_does_not_time_out_this_time_differs(recorder: Recorder, backend: DockerBackend) -> None:
    attempt = await recorder.play("true")
    recorder.change_turn(attempt, 0, timed_out=True, exit_code=None)
    assert matches(await replayed(recorder, backend, attempt)) == [Match.DIFFERS]


async def test_an_attempt_that_broke_its_sandbox_breaks_it_again(recorder: Recorder, backend: DockerBackend) -> None:
    broke = {"stop_reason": StopReason.SANDBOX_KILLED_BY_AGENT, "outcome": Outcome.MODEL_FAILURE, "reward": 0.0}
    attempt = await recorder.play("echo fine", "cat /dev/zero > big", answer="", **broke)
    played = await replayed(recorder, backend, attempt)
    assert played.agrees and played.verdict is None
    assert "disk is full" in played.turns[1].replayed.broken
    whole = await recorder.play("echo fine", answer="", **broke)
    assert matches(await replayed(recorder, backend, whole)) == [Match.DIFFERS]


async def test_another_reward_is_a_difference(recorder: Recorder, backend: DockerBackend) -> None:
    attempt = await recorder.play(*SOLVE)
    recorder.change(attempt, reward=0.0)
    played = await replayed(recorder, backend, attempt)
    assert matches(played) == [Match.AGREES] * 2 and not played.agrees
    assert played.verdict is not None and (played.verdict.recorded, played.verdict.replayed) == (0.0, 1.0)


async def test_an_answer_that_broke_the_verifier_breaks_it_again(recorder: Recorder, backend: DockerBackend) -> None:
    played = await replayed(recorder, backend, await recorder.play("touch broken"))
    assert played.agrees and played.verdict is not None and played.verdict.replayed is None
    attempt = await recorder.play(*SOLVE)
    recorder.change(attempt, reward=0.0, stop_reason=StopReason.VERIFIER_BROKEN_BY_ANSWER)
    assert not (await replayed(recorder, backend, attempt)).agrees


async def test_a_turn_whose_end_was_lost_with_the_sandbox_is_run_and_not_compared(
    recorder: Recorder, backend: DockerBackend
) -> None:
    lost = {"stop_reason": StopReason.SANDBOX_LOST, "outcome": Outcome.INFRA_FAILURE, "reward": None}
    attempt = await recorder.play("echo fine", "echo lost", answer="", **lost)
    recorder.change_turn(attempt, 1, exit_code=None, output_digest="")
    played = await replayed(recorder, backend, attempt)
    assert matches(played) == [Match.AGREES, Match.UNRECORDED] and played.agrees and played.verdict is None


async def test_an_image_that_is_gone_is_named_with_what_to_do(recorder: Recorder, backend: DockerBackend) -> None:
    attempt = await recorder.play("true")
    recorder.change(attempt, image_id="sha256:" + "0" * 64)
    with pytest.raises(ImageGone, match=r"sha256:0+ is not on this machine any more.*busybox is sha256:.*docker save"):
        await replayed(recorder, backend, attempt)
    assert await backend._names({"ratchet.kind": KIND}) == set()


async def test_a_trajectory_that_is_gone_is_named(recorder: Recorder) -> None:
    attempt = await recorder.play("true")
    recorder.store.delete([f"runs/r/trajectories/{attempt}/t0-1.json"])
    with pytest.raises(MissingObject, match=r"t0-1\.json"):
        recorder.recorded(attempt)


async def test_an_episode_id_means_its_last_attempt(recorder: Recorder) -> None:
    attempt = await recorder.play("true")
    assert recorder.recorded(attempt.rpartition("/")[0]).episode.id == attempt


async def test_a_replay_that_is_cancelled_leaves_no_sandbox(recorder: Recorder, backend: DockerBackend) -> None:
    attempt = await recorder.play("true")
    stored = recorder.recorded(attempt)
    task = open_taskset(str(recorder.taskset)).load("write").model_copy(update={"setup": "sleep 20"})
    playing = asyncio.create_task(Player(backend, stored, task).play(go_on=False, show=lambda _: None))
    while not await backend._names({"ratchet.kind": KIND}):
        await asyncio.sleep(0.02)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert await backend._names({"ratchet.kind": KIND}) == set()
