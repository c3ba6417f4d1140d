from __future__ import annotations

import pytest
from sqlalchemy import Engine

from storage import queries
from storage.cache_hits import CacheHits, of_episodes, of_run, reachable
from storage.database import session
from tests.storage import rows
from workflows.contracts import TurnRecord


def turn(
    number: int, prompt: int, sampled: int, cached: int, *, engine: str = "e0", versions: tuple[int, int] = (3, 3)
) -> TurnRecord:
    return TurnRecord(
        turn=number,
        segment=None,
        engine=engine,
        prompt_tokens=prompt,
        sampled_tokens=sampled,
        cached_tokens=cached,
        min_version=versions[0],
        max_version=versions[1],
    )


FIRST = turn(0, 100, 20, 96)
"""Its prompt was there already: a sibling had sent it. 120 tokens are the prefix of the next turn."""


@pytest.mark.parametrize(("prefix", "found"), [(0, 0), (1, 0), (32, 0), (33, 32), (64, 32), (65, 64), (120, 96)])
def test_whole_blocks_without_the_last_sampled_token_can_be_found(prefix: int, found: int) -> None:
    assert reachable(prefix, 32) == found


def test_all_that_can_be_found_is_a_hit_of_one_and_less_of_the_prefix() -> None:
    hits = of_episodes([[FIRST, turn(1, 150, 10, 96)]], block_tokens=32)
    assert hits == CacheHits(1, 120, 96, 96, 0, 0, 1, 100, 96)
    assert (hits.prefix_share, hits.reachable_share) == (0.8, 1.0)


def test_what_a_sibling_had_seen_too_counts_for_no_prefix() -> None:
    assert of_episodes([[FIRST, turn(1, 150, 10, 128)]], block_tokens=32).cached_tokens == 96


def test_a_turn_elsewhere_or_under_new_weights_is_counted_with_its_misses() -> None:
    moved = turn(1, 150, 10, 0, engine="e1")
    updated = turn(2, 190, 10, 0, engine="e1", versions=(4, 5))
    spanned = turn(3, 220, 10, 192, engine="e1", versions=(5, 6))
    hits = of_episodes([[FIRST, moved, updated, spanned]], block_tokens=32)
    assert (hits.turns, hits.moved, hits.updated) == (3, 1, 1)
    assert (hits.prefix_tokens, hits.cached_tokens) == (120 + 160 + 200, 192)


def test_without_a_second_turn_there_is_no_share() -> None:
    hits = of_episodes([[FIRST], []], block_tokens=32)
    assert (hits.turns, hits.prefix_share, hits.reachable_share, hits.first_cached_tokens) == (0, None, None, 96)


def test_a_runs_turns_are_added_up_by_attempt_and_no_other_runs(database: Engine) -> None:
    played = [FIRST, turn(1, 150, 10, 96), turn(2, 180, 5, 128)]
    with session(database) as opened:
        for run in ("r", "other"):
            rows.put_run(opened, run)
            for attempt in (f"{run}/g0/e0/a0", f"{run}/g0/e1/a0"):
                record = rows.record(attempt).model_copy(update={"turns": played})
                queries.put_episode(opened, record=record)
    with session(database) as opened:
        assert of_run(opened, run="r", block_tokens=32) == of_episodes([played, played], block_tokens=32)
        assert of_run(opened, run="nobody", block_tokens=32) == CacheHits()
