from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Engine
from sqlmodel import Session, SQLModel, select

from storage import queries
from storage.database import session
from storage.tables import (
    VOID,
    Batch,
    BatchMember,
    EngineLease,
    EngineLoad,
    Episode,
    Evaluation,
    Group,
    PolicyVersion,
    Publication,
    Quarantine,
    Task,
    Turn,
)
from tests.storage import rows
from workflows.contracts import EvaluationResult, RunState
from workflows.errors import StorageError


@pytest.fixture
def run(database: Engine) -> str:
    with session(database) as opened:
        rows.put_run(opened)
    return "r"


def dumped(opened: Session, table: type[SQLModel]) -> list[dict[str, object]]:
    return [row.model_dump() for row in opened.exec(select(table)).all()]


def upserted(row: SQLModel) -> Callable[[Session], None]:
    return lambda opened: queries.upsert(opened, row)


WRITES: dict[type[SQLModel], Callable[[Session], object]] = {
    Episode: lambda opened: queries.put_episode(opened, record=rows.record()),
    Turn: lambda opened: queries.put_episode(opened, record=rows.record()),
    Group: lambda opened: queries.put_group(opened, run="r", result=rows.group()),
    Task: lambda opened: queries.put_task(opened, ref=rows.TASK, kind="count", instruction="Count."),
    EngineLoad: upserted(EngineLoad(run="r", version=1, engine="local-e0", proven=True, loaded_at=1.0)),
    Quarantine: lambda opened: queries.put_quarantine(opened, run="r", task=rows.TASK, why="3 short groups", since=1.0),
    Publication: upserted(Publication(run="r", version=1, manifest="m", digest="d", bytes=3, published_at=1.0)),
    PolicyVersion: upserted(PolicyVersion(run="r", version=1, step=1, checkpoint="c", created_at=1.0)),
}


@pytest.mark.parametrize("table", WRITES, ids=lambda table: table.__name__)
def test_the_same_write_again_changes_nothing(database: Engine, run: str, table: type[SQLModel]) -> None:
    with session(database) as opened:
        WRITES[table](opened)
        first = dumped(opened, table)
    with session(database) as opened:
        WRITES[table](opened)
    with session(database) as opened:
        assert dumped(opened, table) == first != []


def test_an_evaluation_recorded_again_is_one_row_with_the_newest_figures(database: Engine, run: str) -> None:
    for reward in (0.25, 0.5):
        with session(database) as opened:
            result = EvaluationResult(version=3, episodes=48, mean_reward=reward, by_kind={"count": reward})
            queries.put_evaluation(opened, run=run, result=result)
    with session(database) as opened:
        assert [row.mean_reward for row in opened.exec(select(Evaluation)).all()] == [0.5]


def test_a_group_is_stored_under_the_task_of_its_episodes_with_the_mean_of_its_valid_siblings(
    database: Engine, run: str
) -> None:
    with session(database) as opened:
        made = rows.put_group_with_episodes(opened, rewards=(1.0, 0.0, 0.5))
        stored = opened.get(Group, made.group_id)
        assert stored is not None
        assert (stored.task, stored.mean_reward) == ("shell/count-17", 0.5)


def test_a_reserved_batch_keeps_its_members_in_order_and_its_wait(database: Engine, run: str) -> None:
    with session(database) as opened:
        groups = [rows.put_group_with_episodes(opened, number) for number in (4, 1)]
        assert rows.reserve(opened, *groups) == 4
        members = queries.members_of(opened, batch_id="r/b1")
        batch = opened.get(Batch, "r/b1")
        assert [member.episode for member in members] == groups[0].members + groups[1].members
        assert batch is not None and (batch.state, batch.policy_version) == ("reserved", 0)
        assert batch.waited == {"to_trainable_batch": 12.0, "median": 0.0, "tail": 0.0}


def test_reserving_a_batch_again_gives_the_same_batch_whatever_it_is_asked_for(database: Engine, run: str) -> None:
    with session(database) as opened:
        first, second = (rows.put_group_with_episodes(opened, number) for number in range(2))
        assert rows.reserve(opened, first) == 2
    with session(database) as opened:
        assert rows.reserve(opened, first) == 2
        assert rows.reserve(opened, first, second) == 2
        assert [member.episode for member in queries.members_of(opened, batch_id="r/b1")] == first.members


def test_an_episode_of_another_batch_is_refused_for_good_and_nothing_is_reserved(database: Engine, run: str) -> None:
    with session(database) as opened:
        first, second = (rows.put_group_with_episodes(opened, number) for number in range(2))
        rows.reserve(opened, first)
    with pytest.raises(queries.AlreadyReserved, match="r/g0/e0/a0 is in batch r/b1") as caught, session(database) as o:
        rows.reserve(o, second, first, step=2)
    assert not caught.value.retryable
    with session(database) as opened:
        assert opened.get(Batch, "r/b2") is None
        assert queries.members_of(opened, batch_id="r/b2") == []


def test_the_database_itself_refuses_a_second_batch_for_an_episode(database: Engine, run: str) -> None:
    with session(database) as opened:
        rows.reserve(opened, rows.put_group_with_episodes(opened, 0))
        rows.reserve(opened, rows.put_group_with_episodes(opened, 1), step=2)
    with pytest.raises(StorageError, match=r"(?i)unique"), session(database) as opened:
        opened.add(BatchMember(episode="r/g0/e0/a0", batch="r/b2", group_id="r/g0", position=9))


def test_a_step_of_a_run_has_one_batch(database: Engine, run: str) -> None:
    with session(database) as opened:
        rows.reserve(opened, rows.put_group_with_episodes(opened, 0))
    with pytest.raises(StorageError, match=r"(?i)unique"), session(database) as opened:
        opened.add(Batch(id="r/another", run=run, step=1, policy_version=0, reserved_at=1.0))


def test_a_void_batch_frees_its_step_but_not_its_episodes(database: Engine, run: str) -> None:
    with session(database) as opened:
        first, second, third = (rows.put_group_with_episodes(opened, number) for number in range(3))
        rows.reserve(opened, first)
    with pytest.raises(StorageError, match=r"(?i)unique"), session(database) as opened:
        rows.reserve(opened, second, tries=1)
    with session(database) as opened:
        batch = opened.get(Batch, "r/b1")
        assert batch is not None
        batch.state, batch.reason = VOID, "too far"
    with pytest.raises(queries.AlreadyReserved), session(database) as opened:
        rows.reserve(opened, first, tries=1)
    with session(database) as opened:
        rows.reserve(opened, second, tries=1)
        assert [member.batch for member in queries.members_of(opened, batch_id="r/b1")] == ["r/b1", "r/b1"]
    with pytest.raises(StorageError, match=r"(?i)unique"), session(database) as opened:
        rows.reserve(opened, third, tries=2)


def test_episodes_of_a_void_batch_are_behind_no_version(database: Engine, run: str) -> None:
    with session(database) as opened:
        first, second = (rows.put_group_with_episodes(opened, number) for number in range(2))
        rows.reserve(opened, first)
        batch = opened.get(Batch, "r/b1")
        assert batch is not None
        batch.state = VOID
        opened.flush()
        rows.reserve(opened, second, tries=1)
        opened.add(PolicyVersion(run=run, version=1, step=1, batch="r/b1.1", checkpoint="c", created_at=1.0))
    with session(database) as opened:
        behind = queries.episodes_behind(opened, run=run, version=1)
        assert [episode.id for _, _, episode in behind] == second.members
        _, void, versions = queries.episode_fate(opened, episode=first.members[0])
        assert void is not None and (void.state, versions) == (VOID, [])


def test_only_a_valid_attempt_is_stored_with_a_reward(database: Engine, run: str) -> None:
    with session(database) as opened:
        record = rows.record(reward=None).model_copy(update={"reward": 0.0})
        queries.put_episode(opened, record=record)
        stored = opened.get(Episode, record.attempt_id)
        assert stored is not None and (stored.outcome, stored.reward) == ("infra_failure", None)


@pytest.mark.parametrize(
    "change", [{"outcome": "infra_failure"}, {"outcome": "unknown"}, {"kind": "evaluation"}, {"reward": None}]
)
def test_a_row_that_is_not_of_a_valid_training_attempt_cannot_be_reserved(
    database: Engine, run: str, change: dict[str, object]
) -> None:
    with session(database) as opened:
        made = rows.put_group_with_episodes(opened)
        row = opened.get(Episode, made.members[1])
        assert row is not None
        for name, value in change.items():
            setattr(row, name, value)
    with pytest.raises(StorageError, match="no valid episode row for r/g0/e1/a0"), session(database) as opened:
        rows.reserve(opened, made)


@pytest.mark.parametrize("reward", [None, "missing"])
def test_an_episode_without_a_reward_cannot_be_reserved(database: Engine, run: str, reward: str | None) -> None:
    with (
        pytest.raises(StorageError, match="no valid episode row for r/g0/e1/a0") as caught,
        session(database) as opened,
    ):
        queries.put_episode(opened, record=rows.record("r/g0/e0/a0"))
        if reward is None:
            queries.put_episode(opened, record=rows.record("r/g0/e1/a0", reward=None))
        rows.reserve(opened, rows.group())
    assert not caught.value.retryable


def test_lineage_goes_from_a_version_to_every_episode_before_it_and_back(database: Engine, run: str) -> None:
    with session(database) as opened:
        groups = [rows.put_group_with_episodes(opened, number) for number in range(3)]
        for step, made in enumerate(groups, start=1):
            rows.reserve(opened, made, step=step)
        for version in range(3):
            batch = f"r/b{version}" if version else None
            opened.add(
                PolicyVersion(run=run, version=version, step=version, batch=batch, checkpoint="c", created_at=1.0)
            )
    with session(database) as opened:
        assert queries.episodes_behind(opened, run=run, version=0) == []
        behind = queries.episodes_behind(opened, run=run, version=2)
        assert [(batch.id, episode.id) for batch, _, episode in behind] == [
            ("r/b1", "r/g0/e0/a0"),
            ("r/b1", "r/g0/e1/a0"),
            ("r/b2", "r/g1/e0/a0"),
            ("r/b2", "r/g1/e1/a0"),
        ]
        for batch, _, episode in behind:
            found, its_batch, versions = queries.episode_fate(opened, episode=episode.id)
            assert (found.id, its_batch, versions[-1]) == (episode.id, batch, 2)
        _, batch, versions = queries.episode_fate(opened, episode="r/g1/e0/a0")
        assert batch is not None and (batch.id, versions) == ("r/b2", [2])
        _, unpublished, none_yet = queries.episode_fate(opened, episode="r/g2/e0/a0")
        assert unpublished is not None and (unpublished.id, none_yet) == ("r/b3", [])


def test_an_episode_is_found_by_its_own_id_too_through_its_last_attempt(database: Engine, run: str) -> None:
    with session(database) as opened:
        queries.put_episode(opened, record=rows.record("r/g0/e0/a0", reward=None))
        queries.put_episode(opened, record=rows.record("r/g0/e0/a1"))
        found, batch, versions = queries.episode_fate(opened, episode="r/g0/e0")
        assert (found.id, batch, versions) == ("r/g0/e0/a1", None, [])


def test_what_is_not_there_is_answered_with_what_is(database: Engine, run: str) -> None:
    with session(database) as opened:
        opened.add(PolicyVersion(run=run, version=0, step=0, checkpoint="c", created_at=1.0))
        opened.flush()
        with pytest.raises(queries.NotFound, match="no run 'x'; the latest are: r"):
            queries.run_row(opened, run="x")
        with pytest.raises(queries.NotFound, match="has no version 7; it has 0"):
            queries.episodes_behind(opened, run=run, version=7)
        with pytest.raises(queries.NotFound, match="no episode 'r/g9'"):
            queries.episode_fate(opened, episode="r/g9")


@pytest.mark.parametrize(
    ("state", "holder"),
    [
        (RunState.RUNNING, "r"),
        (RunState.PAUSED, "r"),
        (RunState.DEGRADED, "r"),
        (RunState.FINISHED, ""),
        (RunState.FAILED, ""),
        (RunState.CANCELLED, ""),
    ],
)
def test_engines_are_leased_to_one_run_and_free_once_it_is_over(database: Engine, state: RunState, holder: str) -> None:
    with session(database) as opened:
        rows.put_run(opened, "r", state=state)
        rows.put_run(opened, "other")
        assert queries.lease_engines(opened, run="r") == ""
        assert queries.lease_engines(opened, run="r") == ""
        assert queries.lease_engines(opened, run="other") == holder
        lease = opened.get(EngineLease, queries.ENGINES, populate_existing=True)
        assert lease is not None and lease.run == (holder or "other")


def test_only_its_holder_gives_the_lease_back(database: Engine, run: str) -> None:
    with session(database) as opened:
        queries.lease_engines(opened, run=run)
        queries.release_engines(opened, run="other")
        assert opened.get(EngineLease, queries.ENGINES) is not None
        queries.release_engines(opened, run=run)
        opened.flush()
        assert opened.get(EngineLease, queries.ENGINES) is None
