"""Which archived success joins a group, and where it was used."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine
from sqlmodel import Session, select

from storage import archive, queries
from storage.database import session
from storage.tables import Episode, Group, PolicyVersion, Replay, Run
from tests.storage import rows
from workflows.contracts import GroupResult

ALL_WRONG = (0.0, 0.0, 0.0, 0.0)


def put_run(opened: Session, **training: object) -> None:
    rows.put_run(opened)
    run = opened.get(Run, "r")
    assert run is not None
    run.config = {"training": {"replay_share": 0.2, "replay_pass_rate": 0.25} | training}
    opened.add(run)


def all_wrong(opened: Session, number: int) -> GroupResult:
    """A group whose episodes have rows, and it has none yet."""
    made = rows.group(number, rewards=ALL_WRONG).model_copy(update={"eligible": False, "reason": "no_signal"})
    for attempt_id in made.members:
        queries.put_episode(opened, record=rows.record(attempt_id, reward=0.0))
    return made


def test_the_newest_success_joins_a_group_that_has_none_and_is_the_same_whenever_asked(database: Engine) -> None:
    with session(database) as opened:
        put_run(opened)
        for number, version in ((0, 1), (1, 3), (2, 2)):
            attempt = rows.put_group_with_episodes(opened, number, rewards=(1.0, 0.0, 0.0, 0.0)).members[0]
            row = opened.get(Episode, attempt)
            assert row is not None
            row.max_version = version
            opened.add(row)
        group = all_wrong(opened, 3)
        replay = archive.replay_for(opened, run="r", result=group)
        assert replay == "r/g1/e0/a0"
        queries.put_group(opened, run="r", result=group.joined_by(replay))
        rows.put_group_with_episodes(opened, 4, rewards=(1.0, 0.0, 0.0, 0.0))
        assert archive.replay_for(opened, run="r", result=group) == replay
        recorded = opened.get(Group, group.group_id)
        assert recorded is not None and (recorded.eligible, recorded.replay) == (True, replay)


@pytest.mark.parametrize("why", ["off", "often solved", "tampered", "a signal of its own", "short", "never solved"])
def test_nothing_joins_where_it_should_not(database: Engine, why: str) -> None:
    with session(database) as opened:
        put_run(opened, **({"replay_share": 0.0} if why == "off" else {}))
        successes = {"often solved": (1.0, 1.0, 1.0), "never solved": ()}.get(why, (1.0,))
        made = rows.put_group_with_episodes(opened, 0, rewards=(*successes, 0.0, 0.0, 0.0))
        if why == "tampered":
            row = opened.get(Episode, made.members[0])
            assert row is not None
            row.tampered = True
            opened.add(row)
        group = all_wrong(opened, 1)
        if why == "a signal of its own":
            group = group.model_copy(update={"eligible": True, "reason": ""})
        if why == "short":
            group = group.model_copy(update={"reason": "short_group"})
        assert archive.replay_for(opened, run="r", result=group) == ""


def test_each_use_is_a_row_however_often_it_is_noted(database: Engine) -> None:
    with session(database) as opened:
        put_run(opened)
        first = rows.put_group_with_episodes(opened, 0, rewards=(1.0, 0.0, 0.0, 0.0))
        group = all_wrong(opened, 1).joined_by(first.members[0])
        queries.put_group(opened, run="r", result=group)
        rows.reserve(opened, first, group)
        for _ in range(2):
            assert archive.use(opened, batch_id="r/b1", group_ids=["r/g0", "r/g1"]) == 1
            opened.flush()
        assert [(use.group_id, use.episode) for use in opened.exec(select(Replay)).all()] == [
            ("r/g1", first.members[0])
        ]
        (use,) = archive.uses_in(opened, batch_id="r/b1")
        assert archive.uses_of(opened, attempt=first.members[0]) == [(use, "reserved")]
        opened.add(PolicyVersion(run="r", version=1, step=1, checkpoint="c", created_at=1.0))
        behind = queries.episodes_behind(opened, run="r", version=1)
        assert [episode.id for _, _, episode in behind][-1] == first.members[0] and behind[-1][1] is use
