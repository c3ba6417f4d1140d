"""Opening tasksets, and the order in which a run takes tasks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tasksets import Task, open_taskset, pick
from tasksets.shell import KINDS
from workflows.contracts import Split
from workflows.errors import InvalidConfig

SHELL = open_taskset("shell")


def ids(seed: int, cursor: int, count: int, split: Split = Split.TRAIN) -> list[str]:
    return [task.task_id for task in pick(SHELL, split, seed, cursor, count)]


def test_the_order_does_not_depend_on_how_it_is_asked_for() -> None:
    whole = ids(3, 0, 2000)
    assert [task_id for cursor in range(0, 2000, 7) for task_id in ids(3, cursor, 7)][:2000] == whole
    assert ids(3, 1234, 5) == whole[1234:1239]
    assert ids(3, 5, 0) == []


def test_a_cycle_holds_every_task_once_and_the_next_is_reshuffled() -> None:
    size = len(SHELL.ids(Split.TRAIN))
    first, second = ids(0, 0, size), ids(0, size, size)
    assert sorted(first) == sorted(second) == sorted(SHELL.ids(Split.TRAIN))
    assert first != second
    assert ids(1, 0, size) != first


def test_every_round_holds_every_kind() -> None:
    kinds = [task_id.split("-")[0] for task_id in ids(0, 0, 800)]
    for start in range(0, 800, len(KINDS)):
        assert sorted(kinds[start : start + len(KINDS)]) == sorted(KINDS)
    held_out = Counter(task_id.split("-")[0] for task_id in ids(5, 0, 48, Split.HELD_OUT))
    assert set(held_out.values()) == {6}


def test_kinds_of_unequal_size_run_out_one_by_one() -> None:
    class Uneven:
        name = "uneven"

        def ids(self, split: Split) -> list[str]:
            return ["a-1", "a-2", "a-3", "b-1"] if split is Split.TRAIN else []

        def load(self, task_id: str) -> Task:
            return Task(id=task_id, kind=task_id[0], instruction="", setup="", check="")

    order = [task.task_id for task in pick(Uneven(), Split.TRAIN, 0, 0, 4)]
    assert sorted(order) == ["a-1", "a-2", "a-3", "b-1"]
    assert "b-1" in order[:2]
    with pytest.raises(InvalidConfig, match="held_out"):
        pick(Uneven(), Split.HELD_OUT, 0, 0, 1)


def test_an_unknown_taskset_is_refused_with_what_exists() -> None:
    with pytest.raises(InvalidConfig, match="shell"):
        open_taskset("nowhere")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "held_out").mkdir()
    (tmp_path / "one.toml").write_text('kind = "k"\ninstruction = "i"\nsetup = "true"\ncheck = "exit 1"\n')
    (tmp_path / "held_out" / "two.json").write_text(
        '{"id": "two", "kind": "k", "instruction": "i", "setup": "", "check": "exit 0"}'
    )
    return tmp_path


def test_a_folder_of_toml_and_json_files_is_a_taskset(folder: Path) -> None:
    taskset = open_taskset(str(folder))
    assert taskset.ids(Split.TRAIN) == ["one"]
    assert taskset.ids(Split.HELD_OUT) == ["two"]
    assert taskset.load("one").check == "exit 1"
    assert open_taskset(pick(taskset, Split.TRAIN, 0, 0, 1)[0].taskset).load("one").id == "one"
    with pytest.raises(InvalidConfig, match="three"):
        taskset.load("three")


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("bad.toml", "kind = ", "bad.toml"),
        ("bad.json", "[1]", "bad.json"),
        ("bad.json", '{"kind": "k"}', "instruction"),
        ("bad.toml", 'kind = "k"\ninstruction = "i"\nsetup = ""\ncheck = ""\nextra = 1\n', "extra"),
        ("bad.toml", 'id = "x"\nkind = "k"\ninstruction = "i"\nsetup = ""\ncheck = ""\n', "name says"),
        ("one.json", '{"kind": "k", "instruction": "i", "setup": "", "check": ""}', "twice"),
        ("held_out/one.json", '{"kind": "k", "instruction": "i", "setup": "", "check": ""}', "both splits"),
    ],
)
def test_a_broken_task_file_is_named_with_its_fault(folder: Path, name: str, text: str, fault: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(InvalidConfig, match=fault):
        open_taskset(str(folder))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="file with a task"):
        open_taskset(str(tmp_path))


@pytest.mark.parametrize("name", ["x" * 1000, "~nobody-of-this-name/tasks", "a\0b", "pyproject.toml"])
def test_a_path_that_is_no_folder_is_refused_and_nothing_else(name: str) -> None:
    with pytest.raises(InvalidConfig, match="no taskset"):
        open_taskset(name)
