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
