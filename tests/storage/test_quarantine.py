"""Rewards that were wrong: marks, what they keep out, and what had trained on them."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine
from sqlmodel import Session, select

from storage import archive, queries, series
from storage.affected import affected
from storage.database import session
from storage.groups import barred, sound, trainable
from storage.quarantine import (
    EPISODE,
    TASK,
    Target,
    covered_by,
    find_episode,
    find_task,
    in_quarantine,
    mark_on,
    marks,
    put_mark,
    undo_mark,
)
from storage.tables import Batch, Episode, Group, PolicyVersion, Run
from tests.storage import rows
from tests.storage.conftest import MakeRun
from workflows.contracts import EpisodeKind, RunState

KEY = "shell/count-17"
WHOLE = {"rollout": {"group_size": 4}}
PAIRS = {"rollout": {"group_size": 4, "short_group": "train"}}


def put_run(opened: Session, run: str = "r", **config: object) -> None:
    rows.put_run(opened, run)
    row = opened.get_one(Run, run)
    row.config = {"model": "tiny"} | config
    opened.add(row)
    opened.flush()


def mark(opened: Session, *, episode: str = "", task: str = "", run: str = "r") -> Target:
    target = Target(EPISODE, episode, [run]) if episode else Target(TASK, task, [run])
    put_mark(opened, run=run, target=target, why="an exploit", by="ann@box")
    return target


def undo(opened: Session, target: Target) -> None:
    undo_mark(opened, run=target.runs[0], target=target, why="it was none", by="bob@box")


def marked(opened: Session) -> list[str]:
    return list(opened.exec(select(Episode.id).where(in_quarantine()).order_by(Episode.id)).all())


# --- marks ------------------------------------------------------------------------------------------------------------


def test_a_mark_on_a_task_marks_its_episodes_in_that_run_and_those_that_end_later(database: Engine) -> None:
    with session(database) as opened:
        put_run(opened)
        put_run(opened, "other")
        rows.put_group_with_episodes(opened, 0)
        rows.put_group_with_episodes(opened, 0, run="other")
        mark(opened, task=KEY)
        assert marked(opened) == ["r/g0/e0/a0", "r/g0/e1/a0"]
        rows.put_group_with_episodes(opened, 1)
        assert marked(opened) == [f"r/g{number}/e{index}/a0" for number in (0, 1) for index in (0, 1)]


def test_a_mark_on_an_attempt_marks_that_one_alone(database: Engine) -> None:
    with session(database) as opened:
        put_run(opened)
        rows.put_group_with_episodes(opened, 0)
        mark(opened, episode="r/g0/e1/a0")
        assert marked(opened) == ["r/g0/e1/a0"]
        row = opened.get_one(Episode, "r/g0/e1/a0")
        found = mark_on(opened, attempt=row)
        assert found is not None and (found.why, found.by) == ("an exploit", "ann@box")
        assert mark_on(opened, attempt=opened.get_one(Episode, "r/g0/e0/a0")) is None


def test_the_same_mark_again_changes_nothing_and_an_undoing_stays_recorded(database: Engine) -> None:
    target = Target(EPISODE, "r/g0/e0/a0", ["r"])
    with session(database) as opened:
        put_run(opened)
        rows.put_group_with_episodes(opened, 0)
        first, new = put_mark(opened, run="r", target=target, why="an exploit", by="ann@box")
        again, newer = put_mark(opened, run="r", target=target, why="another word", by="bob@box")
        assert (new, newer) == (True, False) and again == first and first.why == "an exploit"
        undone, did = undo_mark(opened, run="r", target=target, why="it was none", by="bob@box")
        assert did and undone is not None and marked(opened) == []
        assert (undone.undone_by, undone.undone_why, undone.why) == ("bob@box", "it was none", "an exploit")
        same, did = undo_mark(opened, run="r", target=target, why="again", by="eve@box")
        assert not did and same is not None and same.undone_by == "bob@box"
        put_mark(opened, run="r", target=target, why="it was one", by="ann@box")
        assert [row.number for row in marks(opened, run="r")] == [0, 1] and marked(opened) == ["r/g0/e0/a0"]


def test_what_was_never_marked_can_not_be_undone(database: Engine) -> None:
    with session(database) as opened:
        put_run(opened)
        found = undo_mark(opened, run="r", target=Target(TASK, KEY, ["r"]), why="x", by="y")
        assert found == (None, False)


# --- what a person names ----------------------------------------------------------------------------------------------


def test_a_task_is_found_by_key_or_id_in_the_runs_that_tried_it_and_those_that_go_on_with_its_taskset(
    database: Engine,
) -> None:
    with session(database) as opened:
        for run, state in (("tried", RunState.FINISHED), ("going", RunState.RUNNING), ("over", RunState.FAILED)):
            rows.put_run(opened, run, state=state)
        put_run(opened, "elsewhere", taskset="/tasks")
        queries.put_task(opened, ref=rows.TASK, kind="count", instruction="Count.")
        rows.put_group_with_episodes(opened, 0, run="tried")
        for name in (KEY, "count-17"):
            assert find_task(opened, task=name) == Target(TASK, KEY, ["going", "tried"])
        assert find_task(opened, task=KEY, run="tried").runs == ["tried"]
        with pytest.raises(queries.NotFound, match="run 'over' has not tried task shell/count-17"):
            find_task(opened, task=KEY, run="over")


def test_an_episode_is_found_by_its_attempt_or_through_its_last_one(database: Engine) -> None:
    with session(database) as opened:
        put_run(opened)
        queries.put_episode(opened, record=rows.record("r/g0/e0/a0", reward=None))
        queries.put_episode(opened, record=rows.record("r/g0/e0/a1"))
        assert find_episode(opened, episode="r/g0/e0") == Target(EPISODE, "r/g0/e0/a1", ["r"])
        assert find_episode(opened, episode="r/g0/e0/a0").id == "r/g0/e0/a0"
        with pytest.raises(queries.NotFound, match="r/g0/e0/a1 is of run 'r', not of 'x'"):
            find_episode(opened, episode="r/g0/e0", run="x")


@pytest.mark.parametrize(
    ("episode", "said"),
    [
        ("nonsense", "ids look like <run>/g<n>/e<k>/a<m>"),
        ("x/g0/e0", "no run 'x'; the latest are: r"),
        ("r/g0/e7", "of r/g0 there are r/g0/e0/a0, r/g0/e1/a0; an attempt is there once it has ended"),
        ("r/g9/e0/a0", "run 'r' has no attempts of group g9; the last one that closed is r/g0"),
    ],
)
def test_an_episode_that_is_not_there_is_answered_with_what_is(database: Engine, episode: str, said: str) -> None:
    with session(database) as opened:
        put_run(opened)
        rows.put_group_with_episodes(opened, 0)
        with pytest.raises(queries.NotFound) as caught:
            find_episode(opened, episode=episode)
        assert said in str(caught.value)


def test_a_task_that_is_not_there_is_answered_with_those_like_it(database: Engine, make_run: MakeRun) -> None:
    make_run(steps=1)
    with session(database) as opened:
        with pytest.raises(queries.NotFound, match=r"no task 'cuont-1'; there are shell/count-1"):
            find_task(opened, task="cuont-1")
        with pytest.raises(queries.NotFound, match=r"no task 'zzz'; there are shell/count-1, shell/edit-1"):
            find_task(opened, task="zzz")


# --- what is kept out -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "out", "kept"),
    [
        (WHOLE, ["e2"], None),
        (PAIRS, ["e2"], ["e0", "e1", "e3"]),
        (PAIRS, ["e0"], None),
        (PAIRS, ["e0", "e1", "e2"], None),
        (PAIRS, [], ["e0", "e1", "e2", "e3"]),
    ],
    ids=["a whole group is asked for", "enough are left", "no signal is left", "one is left", "nothing is marked"],
)
def test_a_group_trains_without_what_is_marked_as_far_as_the_run_trains_such_a_group(
    database: Engine, config: dict[str, object], out: list[str], kept: list[str] | None
) -> None:
    with session(database) as opened:
        put_run(opened, **config)
        rows.put_group_with_episodes(opened, 0, rewards=(1.0, 0.0, 0.0, 0.0))
        other = rows.put_group_with_episodes(opened, 1, rewards=(1.0, 0.0, 0.0, 0.0))
        for sibling in out:
            mark(opened, episode=f"r/g0/{sibling}/a0")
        groups = [trainable(opened, group_id=f"r/g{number}") for number in (0, 1)]
        found = {group.group_id: group.members for group in sound(opened, run="r", groups=groups)}
        assert found["r/g1"] == other.members
        assert found.get("r/g0") == (None if kept is None else [f"r/g0/{sibling}/a0" for sibling in kept])
        assert barred(opened, run="r") == ([] if kept else [0])


def joined(opened: Session) -> str:
    """A group that only an archived success lets train; its attempt."""
    first = rows.put_group_with_episodes(opened, 0, rewards=(1.0, 0.0, 0.0, 0.0))
    rows.reserve(opened, first)
    wrong = rows.put_group_with_episodes(opened, 1, rewards=(0.0, 0.0, 0.0, 0.0))
    queries.put_group(opened, run="r", result=wrong.joined_by(first.members[0]))
    return first.members[0]


def test_a_group_whose_archived_success_is_marked_trains_no_more(database: Engine) -> None:
    with session(database) as opened:
        put_run(opened, **WHOLE)
        attempt = joined(opened)
        groups = [trainable(opened, group_id="r/g1")]
        assert sound(opened, run="r", groups=groups) == groups
        mark(opened, episode=attempt)
        assert sound(opened, run="r", groups=groups) == [] and barred(opened, run="r") == [1]
        rows.reserve(opened, rows.group(1, rewards=(0.0,) * 4), step=2)
        assert archive.use(opened, batch_id="r/b2", group_ids=["r/g1"]) == 0


def test_the_archive_holds_no_marked_success_and_counts_none_in_the_pass_rate(database: Engine) -> None:
    training = {"replay_share": 0.2, "replay_pass_rate": 0.2}
    with session(database) as opened:
        put_run(opened, training=training)
        for number in (0, 1):
            rows.put_group_with_episodes(opened, number, rewards=(1.0, 0.0, 0.0, 0.0))
        group = rows.group(2, rewards=(0.0,) * 4).model_copy(update={"eligible": False, "reason": "no_signal"})
        for attempt in group.members:
            queries.put_episode(opened, record=rows.record(attempt, reward=0.0))
        assert archive.replay_for(opened, run="r", result=group) == "r/g0/e0/a0"
        first = mark(opened, episode="r/g0/e0/a0")
        assert archive.replay_for(opened, run="r", result=group) == "r/g1/e0/a0"
        mark(opened, episode="r/g1/e0/a0")
        assert archive.replay_for(opened, run="r", result=group) == ""
        undo(opened, first)
        assert archive.replay_for(opened, run="r", result=group) == "r/g0/e0/a0"


def test_marked_successes_of_a_task_that_is_often_solved_make_it_a_rare_one(database: Engine) -> None:
    with session(database) as opened:
        put_run(opened, training={"replay_share": 0.2, "replay_pass_rate": 0.2})
        rows.put_group_with_episodes(opened, 0, rewards=(1.0, 1.0, 0.0, 0.0))
        group = rows.group(1, rewards=(0.0,) * 4).model_copy(update={"eligible": False, "reason": "no_signal"})
        for attempt in group.members:
            queries.put_episode(opened, record=rows.record(attempt, reward=0.0))
        assert archive.replay_for(opened, run="r", result=group) == ""
        mark(opened, episode="r/g0/e1/a0")
        assert archive.replay_for(opened, run="r", result=group) == "r/g0/e0/a0"


def test_marked_rewards_are_in_no_mean_of_a_version_or_a_kind(database: Engine, make_run: MakeRun) -> None:
    run = make_run(steps=2)
    with session(database) as opened:
        before = {item.kind: item for item in series.episodes_by_kind(opened, run=run)}
        target = mark(opened, task="shell/count-1", run=run)
        kinds = {item.kind: item for item in series.episodes_by_kind(opened, run=run)}
        assert kinds["count"].episodes == before["count"].episodes
        assert (kinds["count"].valid, kinds["count"].mean_reward) == (0, None)
        assert {name: kinds[name] for name in ("edit", "find")} == {name: before[name] for name in ("edit", "find")}
        assert sum(item.episodes for item in series.reward_by_version(opened, run=run)) == 2 * 48
        undo(opened, target)
        assert {item.kind: item for item in series.episodes_by_kind(opened, run=run)} == before


# --- what had trained on it -------------------------------------------------------------------------------------------


def test_what_trained_on_a_task_is_told_by_batch_version_and_share(database: Engine, make_run: MakeRun) -> None:
    run = make_run(steps=3)
    with session(database) as opened:
        target = mark(opened, task="shell/edit-1", run=run)
        for which in (in_quarantine(), covered_by(target)):
            found = affected(opened, run=run, which=which)
            assert [(item.batch, item.step, item.version) for item in found.batches] == [
                (f"{run}/b{step}", step, step) for step in (1, 2, 3)
            ]
            assert {(item.episodes, item.of_episodes, item.tokens, item.of_tokens) for item in found.batches} == {
                (16, 64, 16 * 34, 64 * 34)
            }
            assert (found.episodes, found.of_episodes, found.trained, found.of_trained) == (48, 192, 48, 192)
            assert (found.touched, found.of_batches, found.tokens, found.of_tokens) == (3, 3, 48 * 34, 192 * 34)
            assert [(item.run, item.versions) for item in found.versions] == [(run, [1, 2, 3])]


def test_every_later_version_descends_and_so_do_the_runs_that_went_on_from_it(
    database: Engine, make_run: MakeRun
) -> None:
    run = make_run(steps=3)
    with session(database) as opened:
        for name, source in (("second", run), ("third", "second"), ("apart", None)):
            rows.put_run(opened, name)
            opened.get_one(Run, name).resume_from = source
            for version in range(2):
                opened.add(PolicyVersion(run=name, version=version, step=version, checkpoint="c", created_at=1.0))
        opened.flush()
        target = mark(opened, episode=f"{run}/g9/e1/a0", run=run)
        found = affected(opened, run=run, which=covered_by(target))
        assert [(item.batch, item.episodes) for item in found.batches] == [(f"{run}/b2", 1)]
        assert [(item.run, item.versions) for item in found.versions] == [
            (run, [2, 3]),
            ("second", [0, 1]),
            ("third", [0, 1]),
        ]
        untouched = affected(opened, run="apart", which=in_quarantine())
        assert (untouched.episodes, untouched.batches, untouched.versions) == (0, [], [])


def test_a_batch_that_is_cut_keeps_what_it_was_cut_with_and_is_told_with_its_state(database: Engine) -> None:
    with session(database) as opened:
        put_run(opened)
        first, second, third = (rows.put_group_with_episodes(opened, number) for number in range(3))
        rows.reserve(opened, first)
        rows.reserve(opened, second, step=2)
        opened.get_one(Batch, "r/b2").state = "void"
        target = mark(opened, task=KEY)
        members = [member.episode for member in queries.members_of(opened, batch_id="r/b1")]
        assert members == first.members
        found = affected(opened, run="r", which=covered_by(target))
        assert [(item.batch, item.state, item.episodes) for item in found.batches] == [("r/b1", "reserved", 2)]
        assert (found.trained, found.of_trained, found.touched, found.versions) == (0, 0, 0, [])
        assert found.waiting == len(third.members)


def test_an_archived_success_counts_in_each_batch_that_it_trained(database: Engine) -> None:
    with session(database) as opened:
        put_run(opened, **WHOLE)
        attempt = joined(opened)
        rows.reserve(opened, rows.group(1, rewards=(0.0,) * 4), step=2)
        archive.use(opened, batch_id="r/b2", group_ids=["r/g1"])
        for step in (1, 2):
            batch = opened.get_one(Batch, f"r/b{step}")
            batch.state = "trained"
            opened.add(PolicyVersion(run="r", version=step, step=step, checkpoint="c", created_at=1.0))
        target = mark(opened, episode=attempt)
        found = affected(opened, run="r", which=covered_by(target))
        assert [(item.batch, item.episodes, item.of_episodes) for item in found.batches] == [
            ("r/b1", 1, 4),
            ("r/b2", 1, 5),
        ]
        assert found.versions[0].versions == [1, 2]


def test_evaluations_that_counted_a_marked_episode_are_named(database: Engine) -> None:
    with session(database) as opened:
        put_run(opened)
        for version in (0, 3):
            record = rows.record(f"r/eval-v{version}/e0/a0").model_copy(update={"kind": EpisodeKind.EVALUATION})
            queries.put_episode(opened, record=record)
        target = mark(opened, episode="r/eval-v3/e0/a0")
        found = affected(opened, run="r", which=covered_by(target))
        assert (found.evaluations, found.episodes) == ([3], 0)


def test_a_group_that_was_dropped_waits_for_no_batch(database: Engine) -> None:
    with session(database) as opened:
        put_run(opened)
        rows.put_group_with_episodes(opened, 0)
        group = opened.get_one(Group, "r/g0")
        group.eligible = False
        opened.add(group)
        target = mark(opened, task=KEY)
        assert affected(opened, run="r", which=covered_by(target)).waiting == 0 and barred(opened, run="r") == []
