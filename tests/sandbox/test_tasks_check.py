"""`ratchet tasks check` as a person runs it: which tasks are fit to train on, and why the others are not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from activities.sandbox.trial import KIND, Trial
from tests.sandbox.conftest import docker
from tests.sandbox.machines import BASES
from tests.tasksets.public import HARBOR, TERMINAL_BENCH, write_task
from workers import tasks_cli

pytestmark = pytest.mark.docker

ROOT = Path(__file__).parents[2]
MAIN = "from workers.cli import main; main()"
SOLVED = {"check": '[ "$(cat /work/out)" = plum ]', "oracle": ["echo plum > out"], "oracle_answer": "done"}


@pytest.fixture
def home(docker_host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    BASES.mkdir(exist_ok=True)
    (home / "bases").symlink_to(BASES)
    monkeypatch.setenv("RATCHET_HOME", str(home))
    monkeypatch.setenv("RATCHET_DOCKER_HOST", docker_host)
    monkeypatch.setenv("RATCHET_LOCAL_BASES", "1")
    return home


def check(path: Path | str, *options: str, code: int = 0) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    tasks_cli.register(app)
    result = CliRunner().invoke(app, ["tasks", "check", str(path), *options])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def native(folder: Path, name: str, **fields: Any) -> None:
    task = {"kind": "k", "instruction": "", "setup": "true"} | SOLVED | fields
    (folder / f"{name}.json").write_text(json.dumps(task))


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    """Ten tasks of three formats, four of them unfit."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    native(folder, "fine-1")
    native(folder, "fine-2", oracle=[], oracle_answer="42", check='[ "$ANSWER" = 42 ]')
    reports = '[ -e /work/out ] && echo "PASSED a" || { echo "FAILED a"; exit 1; }'
    native(folder, "fine-3", expected_tests=["a"], check=reports)
    # What its first check leaves fails the second.
    native(folder, "flaky", check="[ -e /work/out ] && [ ! -e /tmp/seen ] && touch /tmp/seen")
    write_task(folder / "fine-4", HARBOR)
    write_task(folder / "fine-5", TERMINAL_BENCH)
    env = HARBOR["task.toml"].replace("[verifier]", '[verifier]\nenv = { LOG = "/logs/verifier/reward.txt" }')
    script = "#!/bin/bash\n[ -e greeting.txt ]; echo $((1 - $?)) > $LOG\n"
    write_task(folder / "fine-6", HARBOR, **{"tests/test.sh": script, "task.toml": env})
    write_task(folder / "trivial", HARBOR, **{"tests/test_outputs.py": "def test_nothing(): pass\n"})
    write_task(folder / "broken", TERMINAL_BENCH, **{"solution.sh": "#!/bin/bash\necho hullo > greeting.txt\nexit 3\n"})
    slow = {"task.toml": HARBOR["task.toml"].replace("timeout_sec = 120.0", "timeout_sec = 12.0")}
    write_task(folder / "slow", HARBOR, **slow, **{"solution/solve.sh": HARBOR["solution/solve.sh"] + "sleep 7\n"})
    return folder


def test_of_ten_tasks_the_broken_the_flaky_the_trivial_and_the_slow_are_found(
    home: Path, ten: Path, docker_host: str
) -> None:
    found = json.loads(check(ten, "--json", "--jobs", "3", code=1).stdout)
    assert (found["fit"], found["unfit"]) == (6, 4)
    unfit = {task["task"]: task["findings"] for task in found["tasks"] if not task["fit"]}
    assert {name: [finding["what"] for finding in findings] for name, findings in unfit.items()} == {
        "broken": ["broken"],
        "flaky": ["flaky"],
        "slow": ["slow"],
        "trivial": ["trivial"],
    }
    why = {name: findings[0]["why"] for name, findings in unfit.items()}
    assert "its oracle gets 0" in why["broken"] and "a command of it failed: exit 3" in why["broken"]
    assert "worth 1 and then 0" in why["flaky"]
    assert "doing nothing gets full reward" in why["trivial"]
    assert "its oracle takes" in why["slow"] and "of 12 s" in why["slow"]
    fine = next(task for task in found["tasks"] if task["task"] == "fine-4")
    assert (fine["nothing"], fine["oracle"], fine["again"], fine["format"]) == (0.0, 1.0, 1.0, "harbor")
    assert fine["local_bases"] == ["debian:bookworm-slim"] and fine["expected_tests"] == 3
    assert docker(docker_host, "ps", "-aq", "--filter", f"label=ratchet.kind={KIND}") == ""
    assert docker(docker_host, "images", "-q", "ratchet/answer") == ""


def test_the_examples_are_fit(home: Path) -> None:
    found = json.loads(check(ROOT / "examples/tasks", "--json").stdout)
    assert {task["format"] for task in found["tasks"]} == {"harbor", "terminal-bench", "native"}


def test_a_person_sees_a_table_and_what_else_is_to_be_known(home: Path, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "greet", HARBOR)
    out = check(folder).stdout
    assert "greet" in out and "1 of 1 tasks are fit" in out
    assert "a Debian made here stood in for debian:bookworm-slim" in out
    assert "1 tasks: it may use the network by default and does not get any" in out


def test_what_a_format_asks_for_in_vain_is_reported_with_the_rest(home: Path, tmp_path: Path) -> None:
    native(tmp_path, "fine")
    write_task(tmp_path / "greedy", HARBOR, **{"task.toml": "[environment]\ngpus = 1\n"})
    out = check(tmp_path, code=1).stdout
    assert "1 of 2 tasks are fit" in out and "unsupported" in out and "it wants GPUs" in out


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"environment/Dockerfile": "FROM debian\nRUN exit 7\n"}, "Step 2/4 : RUN exit 7"),
        ({"solution/solve.sh": None}, "there is no solution"),
        ({"tests/test.sh": "#!/bin/bash\necho of no use\n"}, "no reward was written; its output ends: of no use"),
        (
            {"tests/test_outputs.py": "def test_a(): pass\ndel test_a\ndef test_b(): open('/app/greeting.txt')\n"},
            "not reported: test_outputs.py::test_a",
        ),
        (
            {"solution/solve.sh": "#!/bin/bash\necho hello > greeting.txt\nln -sf /bin/dash /bin/bash\n"},
            "/bin/bash is not what it was",
        ),
    ],
)
def test_a_broken_task_says_where(home: Path, tmp_path: Path, changes: dict[str, str | None], why: str) -> None:
    folder = write_task(tmp_path / "odd", HARBOR, **changes)
    found = json.loads(check(folder, "--json", code=1).stdout)
    findings = {finding["what"]: finding["why"] for finding in found["tasks"][0]["findings"]}
    assert why in findings["broken"], findings


def test_a_native_task_whose_setup_or_check_breaks_is_broken(home: Path, tmp_path: Path) -> None:
    native(tmp_path, "setup", setup="echo no; exit 3")
    native(tmp_path, "check", check="exit 9")
    found = {task["task"]: task["findings"] for task in json.loads(check(tmp_path, "--json", code=1).stdout)["tasks"]}
    assert "the setup of setup failed: exit 3: no" in found["setup"][0]["why"]
    assert "exit 9; on a known-good answer: exit 9" in found["check"][0]["why"]


def test_a_taskset_is_checked_by_its_name_and_only_as_far_as_asked(home: Path) -> None:
    found = json.loads(check("shell", "--json", "--limit", "2").stdout)
    assert [task["task"] for task in found["tasks"]] == ["find-0000", "find-0001"] and found["fit"] == 2


def test_what_cannot_be_checked_is_said(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no taskset" in check("nowhere", code=2).stderr
    write_task(tmp_path / "only", HARBOR, **{"task.toml": "[environment]\ngpus = 1\n"})
    assert "none of its tasks can be used: only (it wants GPUs)" in check(tmp_path / "only", code=2).stderr
    native(tmp_path, "fine")
    monkeypatch.setenv("RATCHET_DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    assert "no answer from" in check(tmp_path, code=2).stderr


def test_an_interrupted_check_leaves_no_container(home: Path, tmp_path: Path, docker_host: str) -> None:
    write_task(tmp_path / "long", HARBOR, **{"solution/solve.sh": "#!/bin/bash\ntouch /logs/agent/begun\nsleep 60\n"})
    command = [sys.executable, "-c", MAIN, "tasks", "check", str(tmp_path / "long")]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ}, stderr=subprocess.PIPE, text=True)
    listed = ("ps", "-q", "--filter", f"label=ratchet.kind={KIND}", "--filter", "label=ratchet.task=long")
    begun = False
    while not begun:
        assert process.poll() is None
        for container in docker(docker_host, *listed).split():
            begun = begun or "begun" in docker(docker_host, "diff", container)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted; its sandboxes are removed" in said
    assert docker(docker_host, *listed) == ""


def test_a_task_whose_image_cannot_be_had_is_broken_and_the_others_are_checked(home: Path, tmp_path: Path) -> None:
    native(tmp_path, "fine")
    write_task(tmp_path / "away", HARBOR, **{"environment/Dockerfile": "FROM registry.invalid/org/name:1\n"})
    write_task(
        tmp_path / "kept", HARBOR, **{"environment/Dockerfile": f"{HARBOR['environment/Dockerfile']}VOLUME /d\n"}
    )
    found = {task["task"]: task for task in json.loads(check(tmp_path, "--json", code=1).stdout)["tasks"]}
    assert found["fine"]["fit"]
    [away], [kept] = found["away"]["findings"], found["kept"]["findings"]
    assert away["what"] == "broken" and "registry.invalid/org/name:1 is not on this machine" in away["why"]
    assert kept["what"] == "unsupported" and "keeps /d in volumes" in kept["why"]


def test_what_a_task_says_is_shown_as_it_is_and_changes_nothing_else(home: Path, tmp_path: Path) -> None:
    says = "printf 'no [/b] of [red]that[/red] :warning: \\033]0;title\\007\\033[2J' >&2; exit 3"
    native(tmp_path, "loud", oracle=[says])
    native(tmp_path, "fine")
    shown = " ".join(check(tmp_path, code=1).stdout.split())
    assert "[/b] of [red]that[/red] :warning:" in shown and "\x1b" not in shown
    assert "1 of 2 tasks are fit" in shown


def test_a_fault_of_ours_costs_one_task_and_not_what_was_found_of_the_others(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native(tmp_path, "fine")
    native(tmp_path, "odd", setup="true #odd")
    solve = Trial._solve

    async def failing(self: Trial, play: Any) -> str:
        if play.task.id == "odd":
            raise KeyError("nothing that anybody thought of")
        return await solve(self, play)

    monkeypatch.setattr(Trial, "_solve", failing)
    found = {task["task"]: task for task in json.loads(check(tmp_path, "--json", code=1).stdout)["tasks"]}
    assert found["fine"]["fit"]
    assert "our own fault: KeyError" in found["odd"]["findings"][0]["why"]
