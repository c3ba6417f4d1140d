"""The main job on real parts: one command trains an agent, whatever is killed meanwhile."""

from __future__ import annotations

import json
from typing import Any

import pytest

from storage.database import session
from storage.tables import Run
from tests.account import assert_complete
from tests.stack import STEPS, Stack, small_run, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_a_run_trains_publishes_evaluates_and_leaves_nothing(stack: Stack, straight: str) -> None:
    assert_complete(stack, straight, steps=STEPS)
    report = json.loads(stack.ratchet("report", straight, "--json").stdout)
    assert 0 <= report["evaluation"]["first"] <= 1 and 0 <= report["evaluation"]["last"] <= 1
    listed = stack.ratchet("lineage", straight, "--version", "2").stdout
    assert f"{straight}/g" in listed
    episode = next(word for word in listed.split() if word.startswith(f"{straight}/g") and "/a" in word)
    assert f"{straight}/b" in stack.ratchet("lineage", "--episode", episode).stdout


def test_an_async_run_survives_a_dead_worker_and_goes_on_after_down_and_up(stack: Stack) -> None:
    run, steps = "down-up", 2
    stack.start(run, small_run(mode="async", evaluation={"tasks": 0}, training={"steps": steps}))
    wait_for(lambda: stack.status(run).get("groups_in_flight", 0) > 0, 200)
    stack.kill("rollout")
    wait_for(lambda: stack.status(run).get("step", -1) >= 1, 300)
    stack.ratchet("down")
    stack.ratchet("up")
    stack.finish(run)
    assert_complete(stack, run, steps=steps)


def test_a_run_pauses_and_resumes_by_signal_and_ends_by_cancel_and_another_starts_from_its_checkpoint(
    stack: Stack,
) -> None:
    run = "cancelled"
    stack.start(run, small_run(mode="async", evaluation={"tasks": 0}, training={"steps": 50}))
    wait_for(lambda: stack.status(run).get("groups_in_flight", 0) > 0, 200)
    stack.temporal("workflow", "signal", "-w", run, "--name", "pause")
    wait_for(lambda: stack.status(run).get("groups_in_flight", -1) == 0, 200, lambda: str(stack.status(run)))
    assert stack.status(run)["state"] == "paused"
    stack.temporal("workflow", "signal", "-w", run, "--name", "resume")
    wait_for(lambda: bool(stack.status(run).get("step")), 300)
    stack.temporal("workflow", "cancel", "-w", run)
    wait_for(lambda: stack.closed(run)[0] == "CANCELED", 200, lambda: str(stack.status(run)))
    assert stack.containers(run) == []
    with session(stack.database()) as opened:
        row = opened.get(Run, run)
        assert row is not None and row.state == "cancelled" and row.step >= 1
    stack.start("continued", small_run(resume_from=run, evaluation={"tasks": 0}, training={"steps": 1}))
    stack.finish("continued")
    assert_complete(stack, "continued", steps=1)


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
