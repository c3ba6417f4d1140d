"""Which tasks flake, and where attempts were lost."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine

from storage import health
from storage.database import session
from storage.tables import EngineLoad
from tests.storage import rows
from tests.storage.troubles import put_attempt
from workflows.contracts import StopReason, TurnRecord


def turns(action: str = "ls", answer: str = "Answer: 1", **command: Any) -> list[TurnRecord]:
    """A command, which exits with 0 and a digest unless told otherwise, and an answer."""
    ended = {"exit_code": 0, "output_digest": "d"} | command
    return [TurnRecord(turn=0, segment="s", action=action, **ended), TurnRecord(turn=1, segment="s", action=answer)]


@pytest.mark.parametrize(
    ("one", "other", "flakes"),
    [
        (turns(), turns(), True),
        (turns(), turns("pwd"), False),
        (turns(), turns(output_digest="e"), False),
        (turns(), turns(answer="Answer: 2"), False),
        (turns(), turns(exit_code=1), False),
        (turns("a long command…"), turns("a long command…"), False),
        (turns(output_digest=""), turns(output_digest=""), False),
        (
            turns(exit_code=None, output_digest="", timed_out=True),
            turns(exit_code=None, output_digest="", timed_out=True),
            False,
        ),
        ([], [], False),
    ],
)
def test_a_task_flakes_when_the_same_doings_are_scored_differently(
    database: Engine, one: list[TurnRecord], other: list[TurnRecord], flakes: bool
) -> None:
    with session(database) as opened:
        rows.put_run(opened)
        put_attempt(opened, "r/g0/e0/a0", reward=1.0, turns=one)
        put_attempt(opened, "r/g0/e1/a0", reward=0.0, turns=other)
        put_attempt(opened, "r/g0/e2/a0", reward=None, turns=other)
        found = health.flakes(opened, run="r")
    expected = health.Flake("shell/count-17", "r/g0/e0/a0", 1.0, "r/g0/e1/a0", 0.0)
    assert found == ([expected] if flakes else [])


@pytest.mark.parametrize(
    ("stop_reason", "why", "boundary", "place"),
    [
        ("sandbox_lost", "SandboxLost: the daemon of host box-b.lan went away", "sandbox", "box-b.lan"),
        ("sandbox_lost", "SandboxLost: sandbox 3 lives on box-b, this is box-a", "sandbox", "box-b"),
        (
            "sandbox_lost",
            "SandboxLost: docker create: no answer from tcp://b:2375: ClientError",
            "sandbox",
            "tcp://b:2375",
        ),
        ("sandbox_lost", "the worker was lost (heartbeat time-out)", "sandbox", ""),
        ("sandbox_lost", "SandboxLost: host box-c: docker create: no answer from unix:///x: y", "sandbox", "box-c"),
        ("sandbox_lost", "host box-c: it takes up nothing any more", "sandbox", "box-c"),
        ("engine_lost", "EngineLost: local-e1 /inference/v1/generate: ConnectError", "engine", "local-e1"),
        ("engine_lost", "EngineLost: local-e12: an answer that can't be read", "engine", "local-e0"),
        ("storage_lost", "StorageLost: put x: 500", "storage", ""),
        ("verifier_lost", "VerifierLost: the known-good answer fails", "verifier", ""),
        ("undetermined", "it ran past its bound on a living worker", "unknown", ""),
    ],
)
def test_a_lost_attempt_has_a_boundary_and_a_place_where_the_failure_names_one(
    database: Engine, stop_reason: str, why: str, boundary: str, place: str
) -> None:
    with session(database) as opened:
        rows.put_run(opened)
        for engine in ("local-e0", "local-e1"):
            opened.add(EngineLoad(run="r", version=0, engine=engine, proven=True, loaded_at=1.0))
        made = [TurnRecord(turn=0, segment="s", engine="local-e0")]
        put_attempt(opened, "r/g0/e0/a0", reward=None, stop_reason=StopReason(stop_reason), why=why, turns=made)
        (loss,) = health.losses(opened, run="r")
    assert (loss.boundary, loss.place, loss.attempts, loss.why) == (boundary, place, 1, why)


def test_the_host_of_a_lost_sandbox_is_the_one_that_its_row_names(database: Engine) -> None:
    with session(database) as opened:
        rows.put_run(opened)
        put_attempt(opened, "r/g0/e0/a0", reward=None, host="b", why="sandbox 3 lives on c, this is b")
        lost = {"stop_reason": StopReason.ENGINE_LOST, "why": "no engine answers", "host": "b"}
        put_attempt(opened, "r/g0/e1/a0", reward=None, **lost)
        found = {loss.boundary: loss.place for loss in health.losses(opened, run="r")}
    assert found == {"sandbox": "b", "engine": ""}


def test_a_host_is_dead_whose_last_attempts_were_lost_and_not_one_that_came_back(database: Engine) -> None:
    with session(database) as opened:
        rows.put_run(opened)
        for host, ended in (("a", "wwllw"), ("b", "wlwll"), ("c", "wl"), ("d", "ll"), ("", "ll")):
            for at, letter in enumerate(ended):
                reward = 0.0 if letter == "w" else None
                put_attempt(opened, f"r/g0/{host}{at}/a0", reward=reward, host=host, ended_at=10.0 + at, why="gone")
        found = health.hosts(opened, run="r")
    assert [(item.host, item.attempts, item.lost, item.dead, item.well_at) for item in found] == [
        ("a", 5, 2, False, 14.0),
        ("b", 5, 3, True, 12.0),
        ("c", 2, 1, False, 10.0),
        ("d", 2, 2, True, None),
    ]


def test_lost_attempts_can_be_replayed_where_image_and_tokens_are_recorded(database: Engine) -> None:
    with session(database) as opened:
        rows.put_run(opened)
        whole = [TurnRecord(turn=0, segment="s", action="ls", exit_code=0)]
        put_attempt(opened, "r/g0/e0/a0", reward=None, turns=whole)
        put_attempt(opened, "r/g0/e1/a0", reward=None, turns=whole, image_id="")
        put_attempt(opened, "r/g0/e2/a0", reward=None, turns=[TurnRecord(turn=0, segment=None)])
        put_attempt(opened, "r/g0/e3/a0", reward=1.0, replays=2)
        put_attempt(opened, "r/g0/e4/a0", reward=None, replays=1, ended_at=9.0)
        (loss,) = health.losses(opened, run="r", since=10.0)
        assert health.replays(opened, run="r") == (2, 1)
    assert (loss.attempts, loss.reproducible, loss.example) == (3, 1, "r/g0/e0/a0")
