"""Rewards to plant into a made run that look wrong, one kind per function. Each returns the attempts that an audit must
name, and words by which it must."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlmodel import Session

from storage import queries
from tests.storage import rows
from tests.storage.made_run import START
from tests.storage.troubles import RUN, flaky_task, put_attempt
from workflows.contracts import StopReason, TurnRecord

DIGEST = "d" * 64


class Planted(NamedTuple):
    suspicion: str
    attempts: list[str]
    words: str


def no_command(opened: Session) -> Planted:
    attempts = [_attempt(opened, number, commands=0) for number in range(2)]
    _attempt(opened, 2, commands=1)
    return Planted("no_command", attempts, "2 of 3 successes ran no command")


def short_verifier(opened: Session) -> Planted:
    """One verdict came long before the tests could have run."""
    for number in range(14):
        _attempt(opened, number, commands=2, verify_s=30 + 0.1 * number)
    odd = _attempt(opened, 99, commands=2, verify_s=0.8)
    return Planted("verifier_time", [odd], "far from the usual 30.6 s")


def long_verifier(opened: Session) -> Planted:
    for number in range(14):
        _attempt(opened, number, commands=2, verify_s=4 + 0.1 * number)
    odd = _attempt(opened, 99, commands=2, verify_s=55.0)
    return Planted("verifier_time", [odd], "one for 55.0 s")


def fewer_than_the_oracle(opened: Session) -> Planted:
    queries.put_task(opened, ref=rows.TASK, kind="count", instruction="Count.", oracle_commands=8)
    _attempt(opened, 0, commands=5)
    odd = _attempt(opened, 1, commands=1)
    return Planted("few_commands", [odd], "the 8 that the oracle runs, one took 1")


def fewer_than_the_others(opened: Session) -> Planted:
    for number in range(14):
        _attempt(opened, number, commands=8 + number % 3)
    odd = _attempt(opened, 99, commands=2)
    return Planted("few_commands", [odd], "the 9 that successes run in the median, one took 2")


def tampering(opened: Session) -> Planted:
    ended = {"tampered": True, "stop_reason": StopReason.TAMPERED, "why": "a protected file is not what it was"}
    odd = _attempt(opened, 0, reward=0.0, commands=1, **ended)
    return Planted("tampered", [odd], "1 of 1 attempts touched the tests or the verifier")


def flaky_verifier(opened: Session) -> Planted:
    flaky_task(opened)
    return Planted("flaky_verifier", [f"{RUN}/g{number}/e0/a0" for number in (900, 901)], "from 0 to 1")


PLANTS = [
    no_command,
    short_verifier,
    long_verifier,
    fewer_than_the_oracle,
    fewer_than_the_others,
    tampering,
    flaky_verifier,
]


def _attempt(opened: Session, number: int, *, reward: float = 1.0, commands: int, **changes: Any) -> str:
    """One attempt at a task of its own, and its id; no two do the same."""
    attempt = f"{RUN}/g9{number:02d}/e0/a0"
    turns = [
        TurnRecord(turn=turn, segment=f"s{turn}", action=f"ls {number} {turn}", exit_code=0, output_digest=DIGEST)
        for turn in range(commands)
    ]
    turns.append(TurnRecord(turn=commands, segment=f"s{commands}", action=f"Answer: {number}"))
    put_attempt(opened, attempt, reward=reward, turns=turns, started_at=START + 100, **changes)
    return attempt
