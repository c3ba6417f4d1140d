"""The taskset `shell`: solvable, not by doing nothing, and the same everywhere. Scripts run in a real busybox shell."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tasksets import Task, open_taskset
from tasksets.shell import HELD_OUT_PER_KIND, KINDS, TRAIN_PER_KIND
from workflows.contracts import ActOutput, Split
from workflows.errors import InvalidConfig

SHELL = open_taskset("shell")

pytestmark = pytest.mark.skipif(shutil.which("busybox") is None, reason="needs busybox")


class Box:
    """A folder that stands for the container's root: /work and /data become folders of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "work").mkdir(parents=True)
        (root / "data").mkdir()

    def run(self, script: str, answer: str = "") -> subprocess.CompletedProcess[str]:
        script = script.replace("/work", f"{self.root}/work").replace("/data", f"{self.root}/data")
        return subprocess.run(
            ["busybox", "sh", "-c", script],
            cwd=self.root / "work",
            env={**os.environ, "ANSWER": answer},
            capture_output=True,
            text=True,
            timeout=10,
        )

    def prepare(self, task: Task) -> None:
        result = self.run(task.setup)
        assert (result.returncode, result.stderr) == (0, "")

    def check(self, task: Task, answer: str) -> int:
        return self.run(task.check, answer).returncode


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


def tasks(kind: str) -> list[Task]:
    """Three tasks of a kind, of both splits."""
    ids = [task_id for split in Split for task_id in SHELL.ids(split) if task_id.startswith(f"{kind}-")]
    return [SHELL.load(ids[n]) for n in (0, len(ids) // 2, len(ids) - 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_oracle_passes_and_nothing_passes_before_it(kind: str, tmp_path: Path) -> None:
    for task in tasks(kind):
        box = Box(tmp_path / task.id)
        box.prepare(task)
        assert box.check(task, "") == 1
        for command, observation in zip(task.oracle, task.oracle_observations, strict=True):
            result = box.run(f"exec 2>&1; {command}")
            assert ActOutput(exit_code=result.returncode, output=result.stdout).observation() == observation
        assert box.check(task, task.oracle_answer) == 0, task


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("answer", ["", "done", "unknown", "42"])
def test_an_agent_that_does_nothing_fails_whatever_it_answers(kind: str, answer: str, tmp_path: Path) -> None:
    for task in tasks(kind):
        box = Box(tmp_path / task.id)
        box.prepare(task)
        assert box.check(task, answer) == 1, task


@pytest.mark.parametrize("kind", KINDS)
def test_another_tasks_oracle_fails(kind: str, box: Box) -> None:
    task, other, _ = tasks(kind)
    box.prepare(task)
    for command in other.oracle:
        box.run(command)
    assert box.check(task, other.oracle_answer) == 1


def test_no_answer_is_right_for_many_tasks_of_a_kind() -> None:
    for kind in KINDS:
        answers = [SHELL.load(i).check for split in Split for i in SHELL.ids(split) if i.startswith(f"{kind}-")]
        most = max(answers.count(answer) for answer in set(answers))
        assert most <= 0.08 * len(answers), kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_verifier_says_pass_or_fail_whatever_the_agent_left(kind: str, box: Box) -> None:
    task = tasks(kind)[0]
    box.prepare(task)
    shutil.rmtree(box.root / "work")
    (box.root / "work").mkdir()
    for answer in ("$(exit 7)", "'\"`", "-n", "a\nb", "]"):
        assert box.check(task, answer) == 1


def test_a_task_depends_on_its_id_alone() -> None:
    again = type(SHELL)()
    for task_id in SHELL.ids(Split.HELD_OUT)[:20]:
        assert again.load(task_id) == SHELL.load(task_id)
        assert SHELL.load(task_id).id == task_id


def test_the_splits_share_no_parameters() -> None:
    seen = {
        split: {(task.setup, task.instruction, task.check) for task in map(SHELL.load, SHELL.ids(split))}
        for split in Split
    }
    assert not seen[Split.TRAIN] & seen[Split.HELD_OUT]
    assert len(SHELL.ids(Split.TRAIN)) == len(KINDS) * TRAIN_PER_KIND
    assert len(SHELL.ids(Split.HELD_OUT)) == len(KINDS) * HELD_OUT_PER_KIND


@pytest.mark.parametrize("task_id", ["", "count", "count-9999", "count-1", "dance-0001", "count-00²1"])
def test_an_unknown_id_is_refused_with_the_kinds_that_exist(task_id: str) -> None:
    with pytest.raises(InvalidConfig, match="count"):
        SHELL.load(task_id)
