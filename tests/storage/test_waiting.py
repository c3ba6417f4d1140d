"""The split of a batch's wait, as a rule over recorded times and from rows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine

from storage import queries
from storage.database import session
from storage.tables import Batch
from storage.waiting import CAUSES, PARTS, Way, batch_wait, gpu_hours_waiting, parts_of, wait_of
from tests.storage import rows
from workflows.contracts import BatchWait, Outcome, StopReason

EXAMPLES = settings(max_examples=100)
seconds = st.floats(0, 1000)


def way(started: float, ended: float, closed: float, *, name: str = "r/g0/e0/a0", **worked: float) -> Way:
    return Way(
        attempt_id=name,
        group_id=name.partition("/e")[0],
        admitted_at=worked.pop("admitted", started),
        started_at=started,
        ended_at=ended,
        closed_at=closed,
        **worked,
    )


@st.composite
def ways(draw: st.DrawFn) -> Way:
    """Any recorded times, also those that no clock should give."""
    names = ("queue", "boot", "hidden", "generate", "act", "verify")
    worked = {name: draw(seconds) for name in names}
    return way(draw(seconds), draw(seconds), draw(seconds), admitted=draw(seconds), **worked)


@EXAMPLES
@given(ways(), seconds, seconds)
def test_the_parts_add_up_to_the_wait_and_none_is_negative(item: Way, opened: float, complete: float) -> None:
    parts = parts_of(item, opened, complete)
    assert set(parts) == set(PARTS) and all(value >= -1e-9 for value in parts.values())
    assert sum(parts.values()) == pytest.approx(max(complete - opened, 0.0), abs=1e-6)


@EXAMPLES
@given(st.lists(ways(), min_size=1, max_size=40), seconds, seconds)
def test_the_means_of_a_batch_add_up_and_its_tail_lies_within(items: list[Way], opened: float, complete: float) -> None:
    wait = batch_wait(items, [], opened_at=opened, complete_at=complete)
    assert sum(wait.parts.values()) == pytest.approx(wait.seconds, abs=1e-6)
    assert sum(wait.tail_parts.values()) == pytest.approx(wait.seconds, abs=1e-6)
    assert 0 <= wait.tail_s <= wait.seconds + 1e-9 and 0 <= wait.median_s <= wait.seconds + 1e-9


def test_every_second_of_an_episode_has_its_name() -> None:
    """Admitted 2 s in, 1 s later its second attempt; 10 s of life with 1 s that nobody accounts for."""
    item = way(103.0, 113.0, 115.0, admitted=102.0, queue=0.5, boot=3.0, hidden=2.0, generate=4.0, act=2.5, verify=1.0)
    assert parts_of(item, 100.0, 118.0) == pytest.approx(
        {
            "queue": 2.5,
            "boot": 1.0,
            "generate": 4.0,
            "act": 2.5,
            "verify": 1.0,
            "other": 2.0,
            "wait_for_siblings": 2.0,
            "wait_for_batch": 3.0,
        }
    )


def test_of_an_episode_from_before_the_wait_only_the_share_within_counts() -> None:
    item = way(90.0, 110.0, 110.0, generate=12.0, act=8.0)
    assert parts_of(item, 100.0, 112.0) == pytest.approx(
        dict.fromkeys(PARTS, 0.0) | {"generate": 6.0, "act": 4.0, "wait_for_batch": 2.0}
    )


def test_what_closed_after_the_batch_was_complete_keeps_nobody_waiting() -> None:
    parts = parts_of(way(100.0, 130.0, 131.0, generate=30.0), 100.0, 120.0)
    assert parts == pytest.approx(dict.fromkeys(PARTS, 0.0) | {"generate": 20.0})


@pytest.mark.parametrize(("count", "tail_s"), [(1, 12.0), (2, 6.0), (20, 2.0), (40, 2.5)])
def test_the_tail_is_the_last_twentieth_of_the_episodes_and_one_at_least(count: int, tail_s: float) -> None:
    """Of 20, 19 have ended 2 s before the end; of 40, 38; of 2 one, 6 s before; a single one is all tail."""
    early = {1: [], 2: [106.0], 20: [110.0] * 19, 40: [109.5] * 38}[count]
    ends = [*early, *[111.0] * (count - len(early))]
    items = [way(100.0, end, end, name=f"r/g{number}/e0/a0") for number, end in enumerate(ends)]
    wait = batch_wait(items, items[-1:], opened_at=100.0, complete_at=112.0)
    assert wait.tail_s == pytest.approx(tail_s) and wait.tail_attempt == items[-1].attempt_id


def times(attempt: str, started: float, ended: float, **changes: object) -> dict[str, object]:
    return {"started_at": started, "ended_at": ended, "queue_s": 0.0, "boot_s": 0.0, "generate_s": 4.0} | changes


def test_the_rows_of_a_batch_say_who_completed_it(database: Engine) -> None:
    """Group 1 closes last, kept by an attempt that infrastructure broke: that one is the tail, though it trains not;
    spare siblings that were cut off, or ended after the group had closed, kept nobody waiting."""
    with session(database) as opened:
        rows.put_run(opened)
        for number, closed_at in ((0, 108.0), (1, 118.0)):
            group = rows.group(number).model_copy(update={"started_at": 101.0, "closed_at": closed_at})
            for attempt, reward in zip(group.members, group.rewards, strict=True):
                record = rows.record(attempt, reward=reward)
                queries.put_episode(opened, record=record.model_copy(update=times(attempt, 101.0, closed_at - 3)))
            queries.put_group(opened, run="r", result=group)
        broken = rows.record("r/g1/e1/a1", reward=None).model_copy(update=times("", 102.0, 117.5))
        surplus = rows.record("r/g1/e5/a0", reward=None).model_copy(
            update=times("", 102.0, 119.0, outcome=Outcome.SURPLUS, stop_reason=StopReason.SURPLUS)
        )
        late = rows.record("r/g1/e6/a0", reward=1.0).model_copy(update=times("", 102.0, 118.1))
        for record in (broken, surplus, late):
            queries.put_episode(opened, record=record)
        groups = [(f"r/g{number}", rows.group(number).members) for number in (0, 1)]
        wait = wait_of(opened, groups=groups, opened_at=100.0, complete_at=118.2)
    assert (wait.tail_group, wait.tail_attempt) == ("r/g1", "r/g1/e1/a1")
    assert wait.seconds == pytest.approx(18.2) and sum(wait.parts.values()) == pytest.approx(18.2)
    assert wait.parts["queue"] == pytest.approx(1.0) and wait.parts["wait_for_siblings"] == pytest.approx(3.0)
    assert wait.parts["wait_for_batch"] == pytest.approx((10.2 + 10.2 + 0.2 + 0.2) / 4)
    assert wait.median_s == pytest.approx(10.0), "the episodes end 5 s and 15 s in"


def test_the_split_is_stored_with_the_batch(database: Engine) -> None:
    wait = BatchWait(
        seconds=9.0, parts={"queue": 9.0}, median_s=4.0, tail_s=2.0, tail_group="r/g0", tail_attempt="r/g0/e1/a0"
    )
    with session(database) as opened:
        rows.put_run(opened)
        group = rows.put_group_with_episodes(opened)
        queries.reserve_batch(opened, batch_id="r/b1", run="r", step=1, policy_version=0, groups=[group], wait=wait)
        batch = opened.get(Batch, "r/b1")
        assert batch is not None
        assert batch.waited == {"to_trainable_batch": 9.0, "queue": 9.0, "median": 4.0, "tail": 2.0}
        assert batch.tail == {"group": "r/g0", "attempt": "r/g0/e1/a0", "parts": {}}


def test_gpus_wait_for_each_cause_as_long_as_episodes_spent_on_it_and_for_generation_never() -> None:
    first = {"act": 90.0, "boot": 9.0, "generate": 1000.0, "other": 50.0, "wait_for_batch": 70.0}
    second = {"act": 18.0, "wait_for_siblings": 36.0, "to_trainable_batch": 400.0, "tail": 30.0}
    hours = gpu_hours_waiting([first, second], gpus=8)
    assert hours == pytest.approx({"boot": 0.02, "act": 0.24, "verify": 0.0, "queue": 0.0, "siblings": 0.08})
    assert set(CAUSES.values()) < set(PARTS)
