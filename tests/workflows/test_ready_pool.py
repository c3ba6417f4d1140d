"""The pool's rules, without a server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflows.config import MOST_GROUPS, RunConfig
from workflows.contracts import GroupResult, OpenRunOutput, ReserveBatchInput
from workflows.converter import MAX_PAYLOAD_BYTES
from workflows.quarantine import MOST, MOST_STRUCK, Quarantine
from workflows.ready_pool import PoolRules, ReadyPool
from workflows.run_state import Carry


def rules(**changes: Any) -> PoolRules:
    values = {
        "groups_per_batch": 2,
        "capacity": 4,
        "refill_limit": 6,
        "max_episodes": 10,
        "max_off_policy_steps": 1,
        "waves": False,
    }
    return PoolRules(**(values | changes))


def closed(number: int, *, eligible: bool = True, version: int = 0, members: bool = True) -> GroupResult:
    return GroupResult(
        group_id=f"r/g{number}",
        number=number,
        task_id="t",
        members=["m"] if members else [],
        rewards=[1.0] if members else [],
        eligible=eligible,
        reason="" if eligible else "no_signal",
        min_version=version,
        max_version=version,
    )


def fill(pool: ReadyPool, bounds: PoolRules) -> list[int]:
    return [pool.admit(bounds) for _ in range(pool.admissible(bounds))]


def test_admission_is_bounded_by_what_the_trainer_will_consume() -> None:
    pool, bounds = ReadyPool(), rules()
    assert fill(pool, bounds) == [0, 1, 2, 3]
    for number in (0, 1, 2):
        pool.close(closed(number))
    assert pool.admissible(bounds) == 0, "ready groups hold their slots"
    assert [group.number for group in pool.cut(bounds)] == [0, 1]
    assert pool.admissible(bounds) == 0, "a slot frees when the group was trained, not when it was cut"
    pool.trained()
    assert pool.admissible(bounds) == 2


def test_the_batch_takes_the_oldest_complete_groups() -> None:
    pool, bounds = ReadyPool(), rules()
    fill(pool, bounds)
    for number in (3, 1, 2):
        pool.close(closed(number))
    assert [group.number for group in pool.cut(bounds)] == [1, 2]


def test_a_group_beyond_the_version_limit_is_held_out_and_counted() -> None:
    pool, bounds = ReadyPool(), rules()
    fill(pool, bounds)
    pool.close(closed(0, version=0))
    pool.close(closed(1, version=2))
    pool.drop_stale(bounds, version=2)
    assert [group.number for group in pool.ready] == [1] and pool.dropped == {"too_stale": 1}


def test_a_short_batch_is_cut_when_the_refill_is_used_up() -> None:
    pool, bounds = ReadyPool(), rules(capacity=2, refill_limit=4)
    while not pool.batch_is_ready(bounds):
        for number in fill(pool, bounds):
            pool.close(closed(number, eligible=number == 0))
    assert pool.spent(bounds) and pool.batch_is_ready(bounds)
    assert [group.number for group in pool.cut(bounds)] == [0]
    assert pool.dropped == {"no_signal": 3}


@given(st.permutations(range(4)), st.sets(st.integers(0, 3)))
def test_a_sync_batch_does_not_depend_on_the_order_of_finishing(order: list[int], without_signal: set[int]) -> None:
    bounds = rules(groups_per_batch=4, capacity=4, refill_limit=8, waves=True)
    batches = []
    for sequence in (list(range(4)), order):
        pool = ReadyPool()
        assert fill(pool, bounds) == [0, 1, 2, 3]
        for number in sequence:
            assert pool.admissible(bounds) == 0 and not pool.batch_is_ready(bounds)
            pool.close(closed(number, eligible=number not in without_signal))
        refill = fill(pool, bounds)
        assert len(refill) == len(without_signal)
        for number in reversed(refill):
            pool.close(closed(number))
        batches.append([group.number for group in pool.cut(bounds)])
    assert batches[0] == batches[1] and len(batches[0]) == 4


def test_a_wave_starts_whole_even_when_slots_are_few() -> None:
    pool, bounds = ReadyPool(), rules(groups_per_batch=4, capacity=4, waves=True, max_episodes=2)
    assert fill(pool, bounds) == [0, 1]
    pool.close(closed(0, eligible=False))
    assert fill(pool, bounds) == [2]
    pool.close(closed(1))
    pool.close(closed(2))
    assert fill(pool, bounds) == [3]
    assert not pool.batch_is_ready(bounds)


def test_groups_without_a_valid_sibling_degrade_and_use_up_no_refill() -> None:
    """An outage is bounded by holding admission: the run must outlast it."""
    pool, bounds = ReadyPool(), rules(groups_per_batch=1, capacity=1, refill_limit=2, waves=True)
    for _ in range(20):
        (number,) = fill(pool, bounds)
        pool.close(closed(number, eligible=False, members=False))
        assert not pool.spent(bounds)
    assert pool.degraded
    (number,) = fill(pool, bounds)
    pool.close(closed(number, eligible=False))
    assert not pool.degraded and not pool.spent(bounds)
    (number,) = fill(pool, bounds)
    pool.close(closed(number, eligible=False))
    assert pool.spent(bounds), "groups that closed without a signal do use it up"


def test_groups_too_short_to_train_degrade_as_those_without_a_valid_sibling_do() -> None:
    """A part of the hosts is out: each group keeps a sibling or two, and no batch comes of it."""
    pool, bounds = ReadyPool(), rules(groups_per_batch=1, capacity=1, refill_limit=2, waves=True)
    for _ in range(5):
        (number,) = fill(pool, bounds)
        pool.close(closed(number, eligible=False).model_copy(update={"short": True, "reason": "short_group"}))
    assert pool.degraded and not pool.spent(bounds)


def test_a_full_pool_fits_a_message() -> None:
    """The state of the largest run that the configuration allows crosses continue-as-new, its batch is reserved."""
    group = closed(123456).model_copy(update={"closed_at": 1.8e9 + 0.123456, "first_sibling_at": 1.8e9 + 0.654321})
    pool = ReadyPool(in_flight=[123456] * MOST_GROUPS)
    for _ in range(MOST_GROUPS):
        pool.close(group)
    pool.in_flight = list(range(123456, 123456 + MOST_GROUPS))
    pool.left = dict.fromkeys(pool.in_flight, 512)
    quarantine = Quarantine(
        tasks={
            f"django__django-{number}": f"3 short groups in a row, the last a-run/g{number}" for number in range(MOST)
        },
        strikes={f"sympy__sympy-{number}": 2 for number in range(MOST_STRUCK)},
    )
    config = RunConfig(model="m")
    opened = OpenRunOutput(model="m", train_tasks=1, held_out_tasks=1, engines=[])
    assert (
        len(Carry(config=config, opened=opened, pool=pool, quarantine=quarantine).model_dump_json()) < MAX_PAYLOAD_BYTES
    )
    batch = ReserveBatchInput(run="r", step=1, policy_version=0, groups=pool.ready)
    assert len(batch.model_dump_json()) < MAX_PAYLOAD_BYTES


@pytest.mark.parametrize("reason", ["cancelled", "lost"])
def test_groups_that_an_operator_ended_say_nothing_of_the_infrastructure(reason: str) -> None:
    pool, bounds = ReadyPool(), rules()
    for _ in range(9):
        number = pool.admit(bounds)
        pool.close(closed(number, eligible=False, members=False).model_copy(update={"reason": reason}))
    assert not pool.degraded and pool.dropped == {reason: 9}


@given(
    st.lists(st.booleans(), min_size=1, max_size=24),
    st.sampled_from([0.05, 0.1, 0.2, 0.5]),
    st.integers(1, 6),
    st.integers(2, 8),
)
def test_archived_successes_are_at_most_their_share_of_any_batch_and_never_stop_admission(
    joined: list[bool], share: float, groups: int, size: int
) -> None:
    bounds = rules(
        groups_per_batch=groups, capacity=2 * groups, refill_limit=3 * groups, replay_share=share, group_size=size
    )
    pool = ReadyPool()
    for replayed in joined:
        if not pool.in_flight:
            fill(pool, bounds)
        if pool.batch_is_ready(bounds):
            batch = pool.cut(bounds)
            replays = sum(group.replayed for group in batch)
            assert replays <= share * (len(batch) * size + replays) + 1e-9
            pool.trained()
            continue
        assert pool.in_flight, "neither a batch nor a group in the making"
        pool.close(closed(pool.in_flight[0]).joined_by("r/g0/e0/a0" if replayed else ""))
        pool.turn_away(bounds)


def test_a_report_is_taken_once() -> None:
    pool, bounds = ReadyPool(), rules()
    fill(pool, bounds)
    assert pool.close(closed(0)) and not pool.close(closed(0))
    assert len(pool.ready) == 1
