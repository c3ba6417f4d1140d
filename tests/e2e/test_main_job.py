"""The main job on real parts: one command trains an agent, whatever is killed meanwhile."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from sqlmodel import col, select

from storage.database import session
from storage.objects import ObjectStore
from storage.tables import Batch, BatchMember, EngineLoad, Episode, Group, PolicyVersion, Publication, Run, Turn
from tests.e2e.conftest import Stack, small_run, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

KILLED = ["rollout", "control", "trainer", "engines", "local-e0", "temporal", "s3", "docker"]


def assert_complete(stack: Stack, run: str, steps: int, *, state: str = "finished") -> None:
    """The run's own account of itself: every step made once, every token traced, nothing left behind."""
    with session(stack.database()) as opened:
        row = opened.get(Run, run)
        assert row is not None and row.state == state
        batches = opened.exec(select(Batch).where(Batch.run == run).order_by(col(Batch.step))).all()
        assert [batch.step for batch in batches] == list(range(1, steps + 1))
        assert {batch.state for batch in batches} == {"published"}
        members = opened.exec(
            select(BatchMember, Batch, Episode)
            .join(Batch, col(BatchMember.batch) == Batch.id)
            .join(Episode, col(BatchMember.episode) == Episode.id)
            .where(Batch.run == run)
        ).all()
        assert len({member.episode for member, _, _ in members}) == len(members) > 0
        trained = Counter(episode.episode_id for _, _, episode in members)
        assert max(trained.values()) == 1, "an episode trained through two of its attempts"
        for member, batch, episode in members:
            assert episode.outcome in ("model_success", "model_failure")
            assert member.advantage is not None
            turns = opened.exec(select(Turn).where(Turn.episode == episode.id)).all()
            assert turns and all(turn.segment for turn in turns)
            assert all(0 <= turn.min_version <= turn.max_version <= batch.policy_version for turn in turns)
            assert opened.get(Group, member.group_id) is not None
        versions = opened.exec(select(PolicyVersion).where(PolicyVersion.run == run)).all()
        assert sorted(version.version for version in versions) == list(range(steps + 1))
        assert len(opened.exec(select(Publication).where(Publication.run == run)).all()) == steps + 1
        loads = opened.exec(select(EngineLoad).where(EngineLoad.run == run)).all()
        assert {load.version for load in loads if load.proven} == set(range(steps + 1))
    assert stack.containers(run) == []
    assert object_store(stack).abort_uploads(f"runs/{run}/") == 0
    assert not list(stack.home.glob(f"spool/**/*{run}*"))


def object_store(stack: Stack) -> ObjectStore:
    keys = json.loads((stack.home / "secrets.json").read_text())
    return ObjectStore.connect(
        endpoint=f"http://127.0.0.1:{stack.ports['s3']}",
        bucket="ratchet",
        region="us-east-1",
        access_key=keys["s3_access_key"],
        secret_key=keys["s3_secret_key"],
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_trains_publishes_evaluates_and_leaves_nothing(stack: Stack, mode: str) -> None:
    run = f"plain-{mode}"
    stack.start(run, small_run(mode=mode, continue_as_new_every=1))
    stack.finish(run)
    assert_complete(stack, run, steps=3)
    report = json.loads(stack.ratchet("report", run, "--json").stdout)
    assert 0 <= report["evaluation"]["first"] <= 1 and 0 <= report["evaluation"]["last"] <= 1
    listed = stack.ratchet("lineage", run, "--version", "2").stdout
    assert f"{run}/g" in listed
    episode = next(word for word in listed.split() if word.startswith(f"{run}/g") and "/a" in word)
    assert f"{run}/b" in stack.ratchet("lineage", "--episode", episode).stdout


@pytest.mark.parametrize("part", KILLED)
def test_a_run_survives_kill_9_of(stack: Stack, part: str) -> None:
    if part == "docker" and stack.pid(part) is None:
        pytest.skip("the Docker daemon on this machine is not the stack's to kill")
    run = f"kill-{part}"
    stack.start(run, small_run(mode="async", evaluation={"tasks": 0}))
    wait_for(lambda: bool(stack.status(run).get("step")), 200)
    stack.kill(part)
    stack.finish(run)
    assert_complete(stack, run, steps=3)
    wait_for(lambda: stack.ratchet("status", check=False).returncode == 0, 90)


def test_a_run_goes_on_after_down_and_up(stack: Stack) -> None:
    run = "down-up"
    stack.start(run, small_run(mode="async", evaluation={"tasks": 0}))
    wait_for(lambda: bool(stack.status(run).get("step")), 200)
    stack.ratchet("down")
    stack.ratchet("up")
    stack.finish(run)
    assert_complete(stack, run, steps=3)


def test_cancel_leaves_nothing_and_another_run_starts_from_its_checkpoint(stack: Stack) -> None:
    stack.start("cancelled", small_run(mode="async", evaluation={"tasks": 0}, training={"steps": 50}))
    wait_for(lambda: bool(stack.status("cancelled").get("step")), 200)
    stack.temporal("workflow", "cancel", "-w", "cancelled")
    wait_for(lambda: stack.closed("cancelled")[0] == "CANCELED", 120, lambda: str(stack.status("cancelled")))
    assert stack.containers("cancelled") == []
    with session(stack.database()) as opened:
        row = opened.get(Run, "cancelled")
        assert row is not None and row.state == "cancelled" and row.step >= 1
    stack.start("continued", small_run(resume_from="cancelled", evaluation={"tasks": 0}, training={"steps": 1}))
    stack.finish("continued")
    assert_complete(stack, "continued", steps=1)


def test_pause_and_resume_by_signal(stack: Stack) -> None:
    run = "paused"
    stack.start(run, small_run(mode="async", evaluation={"tasks": 0}, training={"steps": 2}))
    wait_for(lambda: stack.status(run).get("groups_in_flight", 0) > 0, 200)
    stack.temporal("workflow", "signal", "-w", run, "--name", "pause")
    wait_for(lambda: stack.status(run)["groups_in_flight"] == 0, 120)
    held = stack.status(run)
    assert held["state"] == "paused"
    stack.temporal("workflow", "signal", "-w", run, "--name", "resume")
    stack.finish(run)
    assert_complete(stack, run, steps=2)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("unknown-field", {"speed": 9}, ["speed", "unknown field"]),
        ("group-of-one", {"rollout": {"group_size": 1}}, ["rollout.group_size", "greater than or equal to 2"]),
        ("no-model", {"model": "nowhere"}, ["model", "nowhere", "bootstrap"]),
        ("no-taskset", {"taskset": "nothing"}, ["taskset", "shell"]),
        ("cold", {"rollout": {"temperature": 0}}, ["rollout.temperature", "greater than 0"]),
        ("nucleus", {"rollout": {"top_p": 0.9}}, ["rollout.top_p", "top_p = 1"]),
    ],
)
def test_an_invalid_run_ends_at_once(stack: Stack, name: str, changes: dict[str, Any], expected: list[str]) -> None:
    stack.start(name, small_run(**changes))
    wait_for(lambda: stack.closed(name)[0] == "FAILED", 30)
    message = stack.closed(name)[1]
    assert all(word in message for word in expected), message
    if name != "unknown-field":
        return
    path = stack.home / "broken.json"
    path.write_text('{"model": "tiny",')
    argv = ("workflow", "start", "--task-queue", "control", "--type", "TrainingRun", "--input-file", str(path))
    done = stack.temporal(*argv, check=False)
    assert done.returncode != 0 and "not valid JSON" in done.stderr
