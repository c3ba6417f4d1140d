from __future__ import annotations

import pytest

from bench.batches import Collection, EpisodeUse, TurnUse, batch_ends, figures, hit_rate, members, tail_s

CLOSED = {0: 9.0, 1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}


def test_a_batch_by_completion_leaves_the_slow_group_to_the_next() -> None:
    assert batch_ends(CLOSED, 2, 2, by_number=False) == [2.0, 4.0]
    assert members(CLOSED, 2, by_number=False) == [1, 2]


def test_a_batch_by_start_waits_for_the_slow_group() -> None:
    assert batch_ends(CLOSED, 2, 2, by_number=True) == [9.0, 9.0]
    assert members(CLOSED, 2, by_number=True) == [0, 1]


def test_too_few_complete_groups_are_no_batch() -> None:
    with pytest.raises(ValueError, match="5 complete groups are fewer than 6"):
        batch_ends(CLOSED, 3, 2, by_number=False)


def test_cache_hits_are_counted_over_what_the_turn_before_left_behind() -> None:
    turns = [TurnUse(0, 64, 9), TurnUse(100, 96, 9), TurnUse(40, 64, 9)]
    assert hit_rate(turns) == pytest.approx((96 + 40) / 140)
    assert hit_rate(turns, block=32) == 1.0
    assert hit_rate(turns[:1]) == 0.0


def test_figures_say_how_the_batch_differs_from_what_began() -> None:
    episodes = [
        EpisodeUse(1, 0.5, [TurnUse(0, 0, 5), TurnUse(60, 32, 5)]),
        EpisodeUse(2, 1.8, [TurnUse(0, 0, 5)]),
    ]
    found = Collection(closed_s=CLOSED, episodes=episodes, idle=0.25, began=5, lead_s=4.5, parts={"boot": 0.5})
    values = figures(found, 2, 2, lambda number: number == 0)
    assert values["seconds"] == 2.0
    assert (values["slow_share"], values["slow_admitted"]) == (0.0, 0.2)
    assert values["tail_s"] == 3.5
    assert (values["turns"], values["tokens"]) == (1.5, 7.5)
    assert (values["lead_s"], values["time/boot"], values["engine_idle"]) == (4.5, 0.5, 0.25)


def test_the_tail_is_what_the_last_twentieth_of_the_episodes_kept_waiting() -> None:
    ended = [float(second) for second in range(1, 41)]
    assert tail_s(ended, 41.0) == 3.0
    assert tail_s([7.0], 8.0) == 8.0
