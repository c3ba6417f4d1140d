"""Public tasks with links that lead away, numbers that no machine has and files that can't be read: each is its own
reason, and the others stay."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tasksets import open_taskset
from tasksets.folder import FolderTaskset
from tests.tasksets.public import COMPOSE, HARBOR, TERMINAL_BENCH, one, reasons, write_task
from workflows.contracts import Split
from workflows.errors import InvalidConfig


@pytest.mark.parametrize("name", ["environment/Dockerfile", "tests/test.sh", "solution/key", "tests", "instruction.md"])
def test_what_leads_out_of_a_tasks_folder_is_not_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "secret").write_text("secret")
    odd = write_task(tmp_path / "tasks/odd", HARBOR)
    if (odd / name).is_dir():
        shutil.rmtree(odd / name)
    (odd / name).unlink(missing_ok=True)
    (odd / name).symlink_to(tmp_path / ("other" if name == "tests" else "secret"))
    assert f"{name} leads out of the task's folder" in reasons(tmp_path / "tasks", {})


def test_a_link_within_a_task_or_to_what_only_its_machine_has_is_well(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "odd", TERMINAL_BENCH)
    (folder / "tests/again.py").symlink_to("test_outputs.py")
    (folder / "tests/machines").symlink_to("/app/not-on-this-host")
    assert one(folder).id == "odd"
    (folder / "solution.sh").unlink()
    (folder / "solution.sh").symlink_to("/etc/hostname")
    with pytest.raises(InvalidConfig, match=r"solution\.sh leads out"):
        one(folder)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("cpus = 2", "cpus = -1", "environment.cpus: "),
        ("cpus = 2", "cpus = nan", "environment.cpus: "),
        ("cpus = 2", "memory_mb = 3", "memory_mb: "),
        ("cpus = 2", "storage_mb = -1", "environment.storage_mb: "),
        ("timeout_sec = 120.0", "timeout_sec = 0", "agent.timeout_sec: "),
        ("timeout_sec = 60.0", "timeout_sec = -5", "verifier.timeout_sec: "),
        ("timeout_sec = 60.0", "timeout_sec = inf", "verifier.timeout_sec: "),
        ("timeout_sec = 60.0", "timeout_sec = nan", "verifier.timeout_sec: "),
        ("build_timeout_sec = 300.0", "build_timeout_sec = 1e12", "environment.build_timeout_sec: "),
        ("cpus = 2", 'cpus = 2\nhealthcheck = {command = "true", timeout_sec = -1}', "healthcheck.timeout_sec: "),
    ],
)
def test_a_number_that_no_machine_has_leaves_out_its_own_task_alone(
    tmp_path: Path, old: str, new: str, why: str
) -> None:
    toml = HARBOR["task.toml"]
    assert old in toml and why in reasons(tmp_path, HARBOR, **{"task.toml": toml.replace(old, new)})


@pytest.mark.parametrize(
    "line",
    [
        "created_at: 2024-13-45",
        "max_test_timeout_sec: .inf",
        "max_agent_timeout_sec: -1",
        "deep: " + "[" * 5000,
        "name: \x01",
    ],
)
def test_a_yaml_file_that_can_not_be_read_leaves_out_its_own_task_alone(tmp_path: Path, line: str) -> None:
    text = re.sub(r"max_\w+: .*\n", "", TERMINAL_BENCH["task.yaml"])
    assert reasons(tmp_path, TERMINAL_BENCH, **{"task.yaml": f"{text}{line}\n"}).startswith("task.yaml: ")


@pytest.mark.parametrize(
    "line",
    [
        "    created: 2024-13-45\n",
        "    deploy: {resources: {limits: {cpus: '-1'}}}\n",
        "    mem_limit: 1m\n",
        "    healthcheck: {test: 'true', timeout: -5}\n",
    ],
)
def test_a_compose_file_with_impossible_values_leaves_out_its_own_task_alone(tmp_path: Path, line: str) -> None:
    assert reasons(tmp_path, TERMINAL_BENCH, **{"docker-compose.yaml": COMPOSE + line})


def test_a_multiplier_that_makes_phases_endless_is_refused(tmp_path: Path) -> None:
    write_task(tmp_path / "a", HARBOR)
    (tmp_path / "ratchet.toml").write_text("timeout_multiplier = 900000.0\n")
    with pytest.raises(InvalidConfig, match="timeout_multiplier"):
        FolderTaskset(tmp_path)
    (tmp_path / "ratchet.toml").write_text("timeout_multiplier = inf\n")
    with pytest.raises(InvalidConfig, match="timeout_multiplier"):
        FolderTaskset(tmp_path)


def test_tests_that_only_a_machine_has_or_that_are_folders_are_no_reason(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "odd", HARBOR, **{"tests/test.sh": "pytest /tests\n"})
    (folder / "tests/test_linked.py").symlink_to("/app/test_not_on_this_host.py")
    (folder / "tests/test_folder.py").mkdir()
    assert len(one(folder).expected_tests) == 3


def test_links_that_lead_in_circles_leave_out_their_own_task_alone(tmp_path: Path) -> None:
    odd = write_task(tmp_path / "odd", HARBOR)
    shutil.rmtree(odd / "tests")
    (odd / "tests").symlink_to("tests")
    assert reasons(tmp_path, {})


def test_what_lies_beside_public_tasks_need_not_be_readable(tmp_path: Path) -> None:
    write_task(tmp_path / "a", HARBOR)
    (tmp_path / "tsconfig.json").write_text('{"strict": true, // all of it\n}')
    (tmp_path / "data.json").mkdir()
    (tmp_path / "gone.toml").symlink_to("nowhere.toml")
    assert open_taskset(str(tmp_path)).ids(Split.TRAIN) == ["a"]
    (tmp_path / "mine.toml").write_text('kind = "k"\ncheck = \n')
    with pytest.raises(InvalidConfig, match=r"mine\.toml"):
        FolderTaskset(tmp_path)
