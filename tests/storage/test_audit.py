"""Rewards that look wrong: each kind that is planted is found with its attempts, and a healthy run has none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Engine
from sqlmodel import Session

from storage import queries
from storage.audit import Finding, audit
from storage.database import session
from storage.quarantine import EPISODE, Target, put_mark
from storage.report.limits import default_limits
from tests.storage import rows, wrong_rewards
from tests.storage.conftest import MakeRun
from tests.storage.troubles import RUN, put_attempt
from workflows.contracts import TurnRecord


def found(opened: Session) -> list[Finding]:
    return audit(opened, run=RUN, thresholds=default_limits().audit)


def test_a_healthy_run_has_no_finding(database: Engine, make_run: MakeRun) -> None:
    make_run(steps=7)
    with session(database) as opened:
        assert found(opened) == []


@pytest.mark.parametrize("plant", wrong_rewards.PLANTS, ids=lambda plant: plant.__name__)
def test_what_looks_wrong_is_found_with_its_attempts_and_nothing_else_is(
    database: Engine, make_run: MakeRun, plant: Callable[[Session], wrong_rewards.Planted]
) -> None:
    make_run(steps=1)
    with session(database) as opened:
        planted = plant(opened)
        (finding,) = found(opened)
    assert (finding.suspicion, finding.task, finding.episodes) == (
        planted.suspicion,
        "shell/count-17",
        planted.attempts,
    )
    assert planted.words in finding.words


def test_what_is_in_quarantine_is_found_no_more(database: Engine, make_run: MakeRun) -> None:
    make_run(steps=1)
    with session(database) as opened:
        for attempt in wrong_rewards.no_command(opened).attempts:
            put_mark(opened, run=RUN, target=Target(EPISODE, attempt, [RUN]), why="wrong", by="me")
        assert found(opened) == []


def test_an_answer_alone_is_no_suspicion_where_the_oracle_gives_one_alone(database: Engine, make_run: MakeRun) -> None:
    make_run(steps=1)
    with session(database) as opened:
        wrong_rewards.no_command(opened)
        queries.put_task(opened, ref=rows.TASK, kind="count", instruction="Guess.", oracle_commands=0)
        assert found(opened) == []


@pytest.mark.parametrize(
    ("usual", "odd"),
    [(0.05, 0.9), (0.05, 4.9), (20.0, 8.0), (20.0, 60.0)],
    ids=["a busy machine", "a stall below the limit", "half", "three times"],
)
def test_what_a_verifier_of_a_busy_machine_takes_is_no_suspicion(
    database: Engine, make_run: MakeRun, usual: float, odd: float
) -> None:
    make_run(steps=1)
    with session(database) as opened:
        for number, seconds in enumerate([usual] * 14 + [odd]):
            turns = [TurnRecord(turn=0, segment="s", action=f"ls {number}", exit_code=0, output_digest="d" * 64)]
            put_attempt(opened, f"{RUN}/g9{number:02d}/e0/a0", reward=1.0, turns=turns, verify_s=seconds)
        assert found(opened) == []


def test_too_few_successes_say_nothing_of_what_is_usual(database: Engine, make_run: MakeRun) -> None:
    make_run(steps=1)
    with session(database) as opened:
        for number in range(5):
            turns = [TurnRecord(turn=0, segment="s", action=f"ls {number}", exit_code=0, output_digest="d" * 64)]
            put_attempt(opened, f"{RUN}/g90{number}/e0/a0", reward=1.0, turns=turns, verify_s=30.0)
        put_attempt(opened, f"{RUN}/g905/e0/a0", reward=1.0, turns=turns, verify_s=0.5)
        assert found(opened) == []
