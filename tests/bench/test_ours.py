from __future__ import annotations

import pytest
from sqlalchemy import Engine
from sqlmodel import select

from bench import ours
from bench.batches import TurnUse
from bench.idle import Idle
from storage import queries
from storage.database import session
from storage.tables import Batch, Turn
from tests.storage import rows


@pytest.fixture
def recorded(database: Engine) -> float:
    """A run with two complete groups in a batch, one without signal, one short, one that closed after; when the batch
    was reserved."""
    with session(database) as opened:
        rows.put_run(opened)
        made = [rows.put_group_with_episodes(opened, number) for number in range(2)]
        rows.reserve(opened, *made)
        reserved_at = opened.exec(select(Batch)).one().reserved_at
        for number, changes in {
            0: {"closed_at": reserved_at - 8},
            1: {"closed_at": reserved_at - 1},
            2: {"closed_at": reserved_at - 5, "eligible": False, "reason": "no_signal"},
            3: {"closed_at": reserved_at - 4, "eligible": False, "reason": "short_group", "short": True},
            4: {"closed_at": reserved_at + 1},
        }.items():
            result = rows.group(number).model_copy(update={"started_at": reserved_at - 12.0, **changes})
            queries.put_group(opened, run="r", result=result)
        for turn in opened.exec(select(Turn).where(Turn.episode == "r/g0/e0/a0")):
            turn.prompt_tokens, turn.sampled_tokens, turn.cached_tokens = 50 + 40 * turn.turn, 10, 32 * turn.turn
            opened.add(turn)
    return reserved_at


def test_complete_groups_are_those_whose_siblings_all_ended_before_the_cut(database: Engine, recorded: float) -> None:
    idle = Idle([])
    idle.share, idle.cpu_busy = 0.5, 0.75
    found = ours.collected(database, "r", idle, by_number=False)
    assert found.closed_s == pytest.approx({0: 4.0, 1: 11.0, 2: 7.0}, abs=0.01)
    assert (found.lead_s, found.idle, found.cpu_busy, found.began) == (12.0, 0.5, 0.75, 5)
    assert "to_trainable_batch" not in found.parts


def test_a_turn_is_measured_against_what_the_one_before_left(database: Engine, recorded: float) -> None:
    found = ours.collected(database, "r", Idle([]), by_number=False)
    first = next(episode for episode in found.episodes if any(turn.cached for turn in episode.turns))
    assert first.group == 0
    assert first.turns == [TurnUse(0, 0, 10), TurnUse(60, 32, 10)]


def test_a_run_without_a_batch_is_no_measurement(database: Engine) -> None:
    with session(database) as opened:
        rows.put_run(opened)
    with pytest.raises(SystemExit, match="r has no batch"):
        ours.collected(database, "r", Idle([]), by_number=False)
