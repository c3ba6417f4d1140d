"""How the chaos suite tells the first step at which two runs' agents saw different outputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sqlalchemy import Engine

from storage.database import session
from storage.tables import Turn
from tests.chaos import test_chaos as chaos
from tests.storage import rows


def made(database: Engine) -> Any:
    with session(database) as opened:
        for run in ("one", "other"):
            rows.put_run(opened, run)
            for step in (1, 2, 3):
                groups = [rows.put_group_with_episodes(opened, 2 * step + n, run=run) for n in range(2)]
                rows.reserve(opened, *groups, run=run, step=step)
    return SimpleNamespace(database=lambda: database)


def say(database: Engine, run: str, group: int, action: str, digest: str) -> None:
    with session(database) as opened:
        turn = opened.get(Turn, (f"{run}/g{group}/e1/a0", 1))
        assert turn is not None
        turn.action, turn.output_digest = action, digest
        opened.add(turn)


def test_runs_that_saw_the_same_never_part(database: Engine) -> None:
    assert chaos.parted(made(database), "one", "other") == (chaos.STEPS + 1, "")


def test_the_first_command_with_another_output_is_found_with_its_step(database: Engine) -> None:
    stack = made(database)
    for group, action in ((4, "grep a b | /c"), (6, "ls | wc")):
        say(database, "one", group, action, "x")
        say(database, "other", group, action, "y")
    assert chaos.parted(stack, "one", "other") == (2, "grep a b | /c")


def test_another_command_is_no_other_output(database: Engine) -> None:
    stack = made(database)
    say(database, "one", 4, "ls", "x")
    say(database, "other", 4, "pwd", "y")
    assert chaos.parted(stack, "one", "other") == (chaos.STEPS + 1, "")
