"""Which groups a batch takes, what is surplus, and when a batch is complete: the pool's rules without a server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workflows.test_ready_pool import closed, fill, rules
from workflows.config import RunConfig, parse_run_config
from workflows.contracts import GroupResult, OpenRunOutput, PoolPolicy
from workflows.ready_pool import PoolRules, ReadyPool
from workflows.run_state import Carry

EXAMPLES = settings(max_examples=50)


def numbers(pool: ReadyPool, bounds: PoolRules) -> list[int]:
    return [group.number for group in pool.cut(bounds)]


def at(number: int, closed_at: float, **changes: Any) -> GroupResult:
    return closed(number, **changes).model_copy(update={"closed_at": closed_at})


@pytest.mark.parametrize(
    ("policy", "first", "second"),
    [
        (PoolPolicy.OLDEST_FIRST, [1, 2], None),
        (PoolPolicy.READY_FIRST, [2, 3], None),
        (PoolPolicy.IN_ORDER, None, [0, 1]),
    ],
)
def test_a_policy_takes_what_its_name_says(
    policy: PoolPolicy, first: list[int] | None, second: list[int] | None
) -> None:
    """3, 2 and 1 are complete in this order; then 0."""
    pool, bounds = ReadyPool(), rules(policy=policy)
    fill(pool, bounds)
    for moment, number in enumerate((3, 2, 1)):
        pool.close(at(number, moment))
    assert pool.batch_is_ready(bounds) is (first is not None)
    if first is not None:
        assert numbers(pool, bounds) == first
        return
    pool.close(at(0, 9))
    assert pool.batch_is_ready(bounds) and numbers(pool, bounds) == second


def test_in_order_passes_over_what_was_dropped_and_waits_for_nothing_behind_the_batch() -> None:
    pool, bounds = ReadyPool(), rules(policy=PoolPolicy.IN_ORDER)
    fill(pool, bounds)
    pool.close(at(0, 1, eligible=False))
    pool.close(at(1, 2))
    pool.close(at(2, 3))
    assert pool.live == [3] and pool.batch_is_ready(bounds) and numbers(pool, bounds) == [1, 2]


def test_in_order_is_not_cut_past_a_slow_group_because_others_taught_nothing() -> None:
    """However many have closed by then: those that had begun are waited for, and no more than those."""
    pool, bounds = ReadyPool(), rules(policy=PoolPolicy.IN_ORDER, refill_limit=4)
    fill(pool, bounds)
    pool.close(at(0, 1))
    for moment, number in enumerate((2, 3, 4, 5)):
        fill(pool, bounds)
        pool.close(at(number, moment, eligible=False))
        pool.mark(bounds, moment)
    assert 1 in pool.live and not pool.batch_is_ready(bounds)
    fill(pool, bounds)
    pool.close(at(1, 9))
    pool.mark(bounds, 9)
    assert numbers(pool, bounds) == [0, 1]


def played(policy: PoolPolicy, lasts: list[int], lag: int, steps: int) -> ReadyPool:
    """A run whose group `n` takes `lasts[n % len]` turns of a clock; a batch trains at once, each is a version."""
    bounds, pool, version = rules(policy=policy, capacity=2 * (1 + lag), max_off_policy_steps=lag), ReadyPool(), 0
    ends: dict[int, tuple[int, int]] = {}
    for clock in range(500):
        for number in fill(pool, bounds):
            ends[number] = (clock + lasts[number % len(lasts)], version)
        for number in [number for number in sorted(pool.in_flight) if ends[number][0] <= clock]:
            pool.close(at(number, clock, version=ends[number][1]))
        pool.drop_stale(bounds, version)
        pool.mark(bounds, clock)
        if pool.batch_is_ready(bounds):
            assert all(version - (group.min_version or 0) <= lag for group in pool.cut(bounds))
            pool.trained()
            version += 1
        if version == steps:
            return pool
    raise AssertionError(f"only {version} steps: the pool is stuck with {pool}")


@EXAMPLES
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 3))
def test_in_order_every_admitted_group_trains_however_long_it_takes(lasts: list[int], lag: int) -> None:
    """F41: admission is bounded, so nothing that is waited for can become stale, and no work is thrown away."""
    assert played(PoolPolicy.IN_ORDER, lasts, lag, steps=12).dropped == {}


@EXAMPLES
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 3), st.sampled_from(PoolPolicy))
def test_no_policy_gets_stuck_or_trains_beyond_the_lag(lasts: list[int], lag: int, policy: PoolPolicy) -> None:
    assert set(played(policy, lasts, lag, steps=12).dropped) <= {"too_stale"}


def test_what_became_stale_is_counted_and_its_row_will_be_told() -> None:
    """F41: one task that takes three updates among seven that take one, limit 2; what is lost is on record."""
    pool = played(PoolPolicy.READY_FIRST, [30, 1, 1, 1, 1, 1, 1, 1], 2, steps=40)
    told = pool.take_untold()
    assert pool.dropped["too_stale"] == len(told["too_stale"]) > 0 and not pool.take_untold()
    assert all(number % 8 == 0 for number in told["too_stale"]), "only the slow task's"


@EXAMPLES
@given(st.permutations(range(4)), st.sampled_from(PoolPolicy))
def test_without_oversample_a_sync_batch_is_the_same_under_every_policy_and_order(
    order: list[int], policy: PoolPolicy
) -> None:
    pool = ReadyPool()
    bounds = rules(groups_per_batch=4, capacity=4, waves=True, max_off_policy_steps=0, policy=policy)
    fill(pool, bounds)
    for moment, number in enumerate(order):
        assert not pool.batch_is_ready(bounds)
        pool.close(at(number, moment))
    assert numbers(pool, bounds) == [0, 1, 2, 3]


def oversampled(**changes: Any) -> PoolRules:
    return rules(**({"capacity": 4, "max_off_policy_steps": 0, "cancel_surplus": True} | changes))


def test_a_batch_is_cut_from_more_groups_than_it_takes_and_the_rest_is_surplus() -> None:
    pool, bounds = ReadyPool(), oversampled()
    assert fill(pool, bounds) == [0, 1, 2, 3]
    for number in (3, 0, 1):
        pool.close(at(number, 1.0))
    assert numbers(pool, bounds) == [0, 1]
    assert pool.surplus == [2] and pool.ready == [] and pool.dropped == {"surplus": 1}
    assert pool.take_untold() == {"surplus": [3]}, "3 was complete: its row says that it may train"
    assert pool.admissible(bounds) == 0, "what starts during the update would be stale"
    pool.close(at(2, 2.0))
    assert pool.dropped == {"surplus": 2} and pool.take_untold() == {"surplus": [2]} and not pool.ready
    pool.trained()
    assert fill(pool, bounds) == [4, 5, 6, 7]


@EXAMPLES
@given(st.permutations(range(4)), st.integers(0, 4), st.sets(st.integers(0, 3)))
def test_what_an_oversampled_run_admits_is_trained_dropped_or_surplus(
    order: list[int], before_cut: int, broken: set[int]
) -> None:
    pool, bounds = ReadyPool(), oversampled()
    trained = 0
    for _ in range(30):
        fill(pool, bounds)
        turn = [pool.in_flight[index] for index in order if index < len(pool.in_flight)]
        for number in turn[: before_cut or 1]:
            pool.close(at(number, 1.0, eligible=number % 4 not in broken or number % 3 == 0))
        if pool.batch_is_ready(bounds):
            trained += len(pool.cut(bounds))
            for number in list(pool.surplus):
                pool.close(at(number, 2.0, eligible=False, members=False).model_copy(update={"reason": "surplus"}))
            pool.trained()
    assert pool.next_number == trained + sum(pool.dropped.values()) + len(pool.ready) + len(pool.in_flight)
    assert not pool.degraded


def carry(**rollout: Any) -> Carry:
    config = RunConfig(model="m", mode="sync", rollout={"group_size": 2, "groups_per_batch": 2, **rollout})
    return Carry(config=config, opened=OpenRunOutput(model="m", train_tasks=9, held_out_tasks=9, engines=[]))


def test_surplus_is_held_against_nobody() -> None:
    state = carry(oversample=2.0, quarantine_after=1)
    fill(state.pool, state.rules)
    for number in (0, 1):
        state.close(closed(number), now=1.0)
    state.pool.cut(state.rules)
    for number in list(state.pool.surplus):
        short = closed(number, eligible=False).model_copy(update={"short": True, "outcomes": {"surplus": 2}})
        assert state.close(short, now=2.0) and not state.close(short, now=2.0)
    assert (state.short_groups, state.quarantine.row, state.pool.without_valid) == (0, [], 0)
    assert state.pool.dropped == {"surplus": 2} and state.outcomes == {"surplus": 4}


def test_oversample_gives_up_the_waves_of_sync_mode_and_is_refused_in_async() -> None:
    assert carry().rules.waves and not carry().rules.cancel_surplus
    bounds = carry(oversample=1.25, groups_per_batch=8).rules
    assert (bounds.waves, bounds.cancel_surplus, bounds.capacity) == (False, True, 10)
    with pytest.raises(ValueError, match=r"rollout.oversample above 1 needs mode sync"):
        parse_run_config({"model": "m", "rollout": {"oversample": 1.5}})


def test_spare_siblings_take_their_share_of_the_episodes_in_flight() -> None:
    for redundancy, groups in ((0, 4), (2, 3)):
        bounds = carry(group_size=8, group_redundancy=redundancy).rules
        assert ReadyPool().admissible(bounds.model_copy(update={"capacity": 99})) == groups


def test_a_groups_last_siblings_hold_no_more_places_than_they_need() -> None:
    pool, bounds = ReadyPool(), rules(capacity=99, siblings=4, max_episodes=12)
    assert fill(pool, bounds) == [0, 1, 2]
    pool.siblings_left(0, 2)
    assert pool.admissible(bounds) == 0
    pool.siblings_left(2, 2)
    assert fill(pool, bounds) == [3]
    pool.siblings_left(0, 1)
    pool.siblings_left(0, 2)
    assert pool.left == {0: 1, 2: 2}, "signals may come in another order"
    pool.close(closed(2))
    pool.siblings_left(2, 1)
    assert pool.left == {0: 1}, "one that has closed holds nothing"
    assert pool.admissible(bounds) == 0
    pool.close(closed(3))
    assert fill(pool, bounds) == [4]


def test_a_batch_is_complete_from_the_report_that_made_it_so_and_not_from_its_cut() -> None:
    pool, bounds = ReadyPool(), rules()
    fill(pool, bounds)
    for number, now in ((2, 5.0), (0, 7.0), (1, 9.0)):
        pool.close(closed(number))
        pool.mark(bounds, now)
    assert pool.complete_at == 7.0, "1 came later and is taken nevertheless"
    assert numbers(pool, bounds) == [0, 1] and pool.complete_at == 0.0


def test_a_batch_whose_groups_became_stale_is_not_complete_any_more() -> None:
    pool, bounds = ReadyPool(), rules()
    fill(pool, bounds)
    for number in (0, 1):
        pool.close(closed(number, version=0))
    pool.mark(bounds, 3.0)
    pool.drop_stale(bounds, version=5)
    pool.mark(bounds, 4.0)
    assert pool.complete_at == 0.0


def test_the_next_batch_is_collected_from_the_cut_or_from_when_slots_free() -> None:
    lagging, sync = (ReadyPool(), rules()), (ReadyPool(), rules(waves=True, capacity=2, max_off_policy_steps=0))
    for pool, bounds in (lagging, sync):
        fill(pool, bounds)
        for number in (0, 1):
            pool.close(closed(number))
        pool.cut(bounds)
    assert lagging[0].collects(lagging[1]) and not sync[0].collects(sync[1])
    sync[0].trained()
    assert sync[0].collects(sync[1])
