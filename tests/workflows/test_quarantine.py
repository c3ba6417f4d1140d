"""Which tasks go into quarantine, without a server."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workflows.contracts import GroupResult, QuarantineOrder
from workflows.quarantine import MOST, Quarantine
from workflows.ready_pool import GROUPS_TO_DEGRADE


def whole(task_id: str, number: int = 0) -> GroupResult:
    return GroupResult(
        group_id=f"r/g{number}",
        number=number,
        task_id=task_id,
        members=["a", "b"],
        rewards=[1.0, 0.0],
        eligible=True,
    )


def short(task_id: str, number: int = 0, members: int = 0) -> GroupResult:
    return GroupResult(
        group_id=f"r/g{number}",
        number=number,
        task_id=task_id,
        members=["a"] * members,
        rewards=[1.0] * members,
        eligible=False,
        reason="short_group",
        short=True,
    )


def ended(task_id: str, reason: str) -> GroupResult:
    return short(task_id).model_copy(update={"reason": reason, "short": False})


def after(*results: GroupResult, strikes: int = 3) -> Quarantine:
    quarantine = Quarantine()
    for result in results:
        quarantine.note(result, after=strikes)
    return quarantine


def test_a_task_whose_groups_close_short_while_others_do_well_is_in_quarantine_and_says_why() -> None:
    quarantine = after(*(group for number in range(3) for group in (short("bad", number), whole("good"))))
    assert quarantine.tasks == {"bad": "3 short groups in a row, the last g2"}
    assert quarantine.unwritten == ["bad"] and quarantine.strikes == {}


def test_a_whole_group_of_the_task_clears_its_strikes() -> None:
    twice = [short("bad"), whole("good")] * 2
    assert after(*twice).strikes == {"bad": 2}
    assert after(*twice, whole("bad")).strikes == {}
    assert after(*twice, short("bad"), whole("bad"), whole("good")) == Quarantine()


def test_short_groups_count_whether_some_siblings_were_valid_or_none() -> None:
    groups = [short("bad", members=1), whole("good"), short("bad", members=0), whole("good")]
    assert "bad" in after(*groups, strikes=2).tasks


def test_groups_that_an_operator_ended_or_that_were_lost_say_nothing() -> None:
    for reason in ("cancelled", "lost", "failed: the database is gone"):
        assert after(*[ended("t", reason), whole("good")] * 9, strikes=1) == Quarantine()


def test_a_task_in_quarantine_stays_there_and_is_written_once() -> None:
    quarantine = after(*[short("bad"), whole("good")] * 5, whole("bad"), whole("good"))
    assert list(quarantine.tasks) == quarantine.unwritten == ["bad"]
    assert quarantine.strikes == {}


@given(st.lists(st.sampled_from("abcdef"), min_size=GROUPS_TO_DEGRADE, max_size=200))
def test_an_outage_counts_against_no_task_however_long_it_lasts_and_whomever_it_hits(tasks: list[str]) -> None:
    groups = [short(task_id, members=index % 2) for index, task_id in enumerate(tasks)]
    quarantine = after(*groups, strikes=1)
    assert quarantine.tasks == quarantine.strikes == {}
    assert len(quarantine.row) == GROUPS_TO_DEGRADE
    quarantine.note(whole("good"), after=1)
    assert quarantine == Quarantine()


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=200))
def test_where_a_task_only_fails_with_all_others_it_is_never_in_quarantine(groups: list[tuple[str, bool]]) -> None:
    """`d` is whole whenever others are: it fails in outages of all tasks alone."""
    results = []
    for task_id, fails in groups:
        if fails and task_id == "d":
            results += [short(name) for name in "abcd" * GROUPS_TO_DEGRADE]
        else:
            results.append(short(task_id) if fails else whole(task_id))
    assert "d" not in after(*results, whole("good"), strikes=1).tasks


def test_the_run_is_exhausted_when_all_its_tasks_are_in_quarantine_or_too_many_to_be_their_fault() -> None:
    quarantine = Quarantine(tasks={f"t{number}": "why" for number in range(4)})
    assert quarantine.exhausted(5) == ""
    assert quarantine.exhausted(4).startswith("4 of 4 train tasks are in quarantine")
    assert "t0: why; t1: why; t2: why)" in quarantine.exhausted(4)
    many = Quarantine(tasks={f"t{number}": "why" for number in range(MOST)})
    assert many.exhausted(10**6)
    assert len(many.model_dump_json()) < 32_000, "crosses continue-as-new, with the rest of the state"


def test_what_an_operator_marked_is_held_until_it_is_released_whatever_its_groups_say() -> None:
    quarantine = after(short("bad"), whole("good"), strikes=1)
    quarantine.heed(QuarantineOrder(tasks={"wrong": "an exploit", "bad": "that too"}))
    quarantine.note(whole("wrong"), after=1)
    assert quarantine.holds("wrong") and quarantine.holds("bad") and not quarantine.holds("good")
    assert list(quarantine.shown) == ["bad", "wrong"] and quarantine.unwritten == ["bad"]
    quarantine.heed(QuarantineOrder(released=["wrong", "bad", "unheard of"]))
    assert quarantine.holds("bad") and not quarantine.holds("wrong"), "its short groups still hold the other"
