"""What a batch trains on against what was admitted beside it, and what became of groups that train no more."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine
from sqlmodel import Session

from storage import finish_order, groups, queries
from storage.database import session
from storage.tables import Batch, Group
from tests.storage import rows
from workflows.contracts import Outcome, StopReason


@pytest.fixture
def run(database: Engine) -> str:
    with session(database) as opened:
        rows.put_run(opened)
    return "r"


def put(opened: Session, number: int, tokens: int, rewards: tuple[float, ...] = (1.0, 0.0)) -> object:
    made = rows.group(number, rewards=rewards)
    for attempt, reward in zip(made.members, rewards, strict=True):
        record = rows.record(attempt, reward=reward).model_copy(update={"sampled_tokens": tokens})
        queries.put_episode(opened, record=record)
    queries.put_group(opened, run="r", result=made)
    return made


def trained(opened: Session, step: int) -> Batch:
    batch = opened.get(Batch, f"r/b{step}")
    assert batch is not None
    batch.state, batch.trained_at, batch.metrics = "trained", 1.0, {"loss": 0.1}
    opened.add(batch)
    opened.flush()
    return batch


def test_a_window_that_left_the_long_ones_behind_shows_it_once_they_have_closed(database: Engine, run: str) -> None:
    """Of groups 0 to 3 the batch takes 0, 2 and 3; 1 is five times as long and closes two batches later."""
    with session(database) as opened:
        rows.reserve(opened, *(put(opened, number, 10) for number in (0, 2, 3)))  # type: ignore[arg-type]
        batch = trained(opened, 1)
        finish_order.settle(opened, run=run)
        found = {name: batch.metrics[f"finish_order/{name}"] for name in ("tokens_admitted", "open")}
        assert found == {"tokens_admitted": 10.0, "open": 1.0} and batch.metrics["loss"] == 0.1
        rows.reserve(opened, put(opened, 4, 10), step=2)  # type: ignore[arg-type]
        trained(opened, 2)
        put(opened, 1, 50, (1.0, 1.0))
        finish_order.settle(opened, run=run)
        opened.flush()
        found = {name.partition("/")[2]: value for name, value in batch.metrics.items() if "/" in name}
        assert found == {
            "tokens_consumed": 10.0,
            "tokens_admitted": 20.0,
            "tokens_siblings": 10.0,
            "reward_consumed": 0.5,
            "reward_admitted": 0.625,
            "reward_siblings": 0.5,
            "open": 0.0,
        }


def test_spare_siblings_that_came_too_late_are_compared_and_never_trained(database: Engine, run: str) -> None:
    """One ended valid after its group had closed, one was cut off: only the first has a length to compare."""
    with session(database) as opened:
        made = put(opened, 0, 10)
        late = rows.record("r/g0/e2/a0", reward=1.0).model_copy(update={"sampled_tokens": 40})
        surplus = rows.record("r/g0/e3/a0", reward=None).model_copy(
            update={"outcome": Outcome.SURPLUS, "stop_reason": StopReason.SURPLUS, "sampled_tokens": 1000}
        )
        for record in (late, surplus):
            queries.put_episode(opened, record=record)
        taken = groups.trainable(opened, group_id="r/g0")
        assert taken.members == ["r/g0/e0/a0", "r/g0/e1/a0"]
        rows.reserve(opened, made)  # type: ignore[arg-type]
        figures = finish_order.of_batch(opened, run=run, batch_id="r/b1")
    assert (figures["tokens_consumed"], figures["tokens_siblings"]) == (10.0, 20.0)


def test_a_row_from_before_members_were_kept_trains_all_that_is_valid(database: Engine, run: str) -> None:
    with session(database) as opened:
        put(opened, 0, 10)
        group = opened.get(Group, "r/g0")
        assert group is not None
        group.members = None
        opened.add(group)
        opened.flush()
        assert groups.trainable(opened, group_id="r/g0").members == ["r/g0/e0/a0", "r/g0/e1/a0"]


def test_what_is_dropped_after_it_closed_is_in_its_row_with_the_reason(database: Engine, run: str) -> None:
    with session(database) as opened:
        for number in range(3):
            put(opened, number, 10)
        for _ in range(2):
            queries.drop_groups(opened, run=run, dropped={"too_stale": [0], "surplus": [2, 7]})
        assert groups.groups_dropped(opened, run=run) == {"surplus": 1, "too_stale": 1, "left_over": 1}
