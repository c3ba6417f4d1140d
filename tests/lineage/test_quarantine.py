"""`ratchet quarantine` and `ratchet audit`, and what the report says of wrong rewards."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from sqlalchemy import Engine
from sqlmodel import Session

from storage.database import session
from storage.quarantine import TASK, Target, find_task, put_mark
from storage.report import build_report, render_html
from storage.tables import Run, Task
from tests.lineage.commands import ratchet
from tests.lineage.pages import Page
from tests.storage import rows, wrong_rewards
from tests.storage.conftest import MakeRun
from tests.storage.troubles import RUN
from workers.quarantine_cli import _order
from workflows.contracts import RunState, Split

TASK_ID = "shell/edit-1"


@pytest.fixture(autouse=True)
def nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Temporal server is there; and the command ends the test's process no more than any other."""

    def leave(code: int) -> None:
        raise typer.Exit(code)

    monkeypatch.setenv("RATCHET_TEMPORAL_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr("workers.quarantine_cli._leave", leave)


def quarantine(*argv: str, code: int = 0) -> str:
    return ratchet("quarantine", "--why", "the verifier takes an empty file", *argv, code=code).stdout


def test_a_marked_task_lists_the_batches_and_versions_that_it_trained(home: Path, make_run: MakeRun) -> None:
    make_run(steps=3)
    out = quarantine("--task", TASK_ID)
    assert f"in quarantine: task {TASK_ID} in run {RUN}: the verifier takes an empty file (" in out
    assert f"{RUN}: 48 of 192 episodes (25%), trained 48 times: 3 of 3 batches, 25% of the trained tokens" in out
    assert f"versions of {RUN}, made with them or after them: 1 to 3" in out
    for step in (1, 2, 3):
        line = f"  {RUN}/b{step}  step {step}, published, made version {step}: 16 of 64 episodes, 544 of 2176 sampled"
        assert line in out


def test_the_same_command_again_changes_nothing_and_undo_takes_it_back_and_says_so(
    home: Path, make_run: MakeRun
) -> None:
    make_run(steps=1)
    first = json.loads(quarantine("--task", "edit-1", "--json"))
    again = json.loads(quarantine("--task", TASK_ID, "--run", RUN, "--json"))
    assert [mark.pop("new") for mark in (*first["marks"], *again["marks"])] == [True, False]
    assert first == again
    (mark,) = first["marks"]
    assert (mark["run"], mark["kind"], mark["target"]) == (RUN, "task", TASK_ID)
    assert mark["by"].endswith("@local") and mark["since"] > 0 and mark["undone_at"] is None
    assert "in quarantine already: task" in quarantine("--task", TASK_ID)
    undone = ratchet("quarantine", "--task", TASK_ID, "--undo", "--why", "it was none").stdout
    assert "no longer in quarantine" in undone and "undone: it was none" in undone
    assert "was undone before" in ratchet("quarantine", "--task", TASK_ID, "--undo", "--why", "again").stdout
    report = json.loads(ratchet("report", RUN, "--json").stdout)["rewards"]
    (kept,) = report["marks"]
    assert (kept["undone_why"], kept["why"]) == ("it was none", "the verifier takes an empty file")
    assert report["affected"]["episodes"] == 0


def test_episodes_are_marked_one_by_one_by_attempt_or_episode(home: Path, make_run: MakeRun) -> None:
    make_run(steps=2)
    told = json.loads(quarantine("--episode", f"{RUN}/g9/e1", "--episode", f"{RUN}/g9/e0/a0", "--json"))
    assert [mark["target"] for mark in told["marks"]] == [f"{RUN}/g9/e1/a0", f"{RUN}/g9/e0/a0"]
    (affected,) = told["affected"]
    assert (affected["episodes"], affected["trained"], affected["touched_batches"]) == (2, 2, 1)
    assert affected["versions"] == [{"run": RUN, "versions": [2]}]
    assert "its episode: the verifier takes" in ratchet("lineage", "--episode", f"{RUN}/g9/e1").stdout


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--task", "cuont-1"), "no task 'cuont-1'; there are shell/count-1"),
        (("--task", TASK_ID, "--run", "nope"), f"no run 'nope'; the latest are: {RUN}"),
        (("--episode", f"{RUN}/g7/e9"), f"no episode '{RUN}/g7/e9': of {RUN}/g7 there are {RUN}/g7/e0/a0"),
        (("--episode", f"{RUN}/g7/e0", "--episode", "x"), "no episode 'x': ids look like"),
        (("--task", TASK_ID, "--undo"), f"no mark on task {TASK_ID}; in {RUN} there are: none"),
    ],
)
def test_what_is_not_there_ends_with_1_and_a_sentence_that_names_what_is_and_marks_nothing(
    home: Path, make_run: MakeRun, argv: tuple[str, ...], said: str
) -> None:
    make_run(steps=1)
    result = ratchet("quarantine", "--why", "wrong", *argv, code=1)
    assert said in result.stderr and result.stdout == "" and len(result.stderr.splitlines()) == 1
    assert json.loads(ratchet("report", RUN, "--json").stdout)["rewards"]["marks"] == []


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("--task", TASK_ID, "--episode", f"{RUN}/g0/e0"),
        ("--task", TASK_ID, "--why", " "),
    ],
)
def test_wrong_usage_ends_with_2(home: Path, make_run: MakeRun, argv: tuple[str, ...]) -> None:
    make_run(steps=1)
    ratchet("quarantine", "--why", "wrong", *argv, code=2)
    ratchet("quarantine", "--task", TASK_ID, code=2)


def test_a_run_that_goes_on_and_can_not_be_told_is_named_and_its_rows_are_marked(
    home: Path, make_run: MakeRun, database: Engine
) -> None:
    make_run(steps=2, state="running")
    with session(database) as opened:
        rows.put_run(opened, "waiting", state=RunState.STARTING)
        rows.put_run(opened, "elsewhere")
        opened.get_one(Run, "elsewhere").temporal_namespace = "staging/1"
    result = ratchet("quarantine", "--task", TASK_ID, "--why", "wrong", code=1)
    assert f"run {RUN} could not be told: no Temporal server answers at 127.0.0.1:1" in result.stderr
    assert "run waiting could not be told: no Temporal server answers" in result.stderr
    assert "run elsewhere could not be told: it was started in the Temporal namespace staging" in result.stderr
    assert "its episodes are marked all the same" in result.stderr
    assert "32 of 128 episodes (25%)" in result.stdout
    told = json.loads(ratchet("quarantine", "--task", TASK_ID, "--why", "wrong", "--json", code=1).stdout)
    assert told["told"] == {RUN: False, "waiting": False, "elsewhere": False}
    assert [mark["new"] for mark in told["marks"]] == [False] * 3


def test_the_report_shows_marks_and_their_share_and_its_check_is_not_passed(healthy: str) -> None:
    quarantine("--episode", f"{healthy}/g9/e1")
    result = ratchet("report", healthy, "--check", code=1)
    (line,) = result.stderr.splitlines()
    assert line.startswith("not ready: environment reliability: trained tokens in quarantine 0.1%, at most 0% (")
    assert f"episode {healthy}/g9/e1/a0: the verifier takes an empty file" in line
    shown = " ".join(result.stdout.split())
    assert "Rewards in quarantine" in shown and "1 of 984 episodes (0.1%)" in shown
    assert "1 of 15 batches" in shown and "made with them or after them: 2 to 15" in shown
    ratchet("quarantine", "--episode", f"{healthy}/g9/e1", "--undo", "--why", "it was none")
    assert ratchet("report", healthy, "--check").stderr == ""


def test_marks_and_findings_read_in_terminal_and_page_whatever_was_written_into_them(
    healthy: str, database: Engine
) -> None:
    with session(database) as opened:
        wrong_rewards.no_command(opened)
        wrong_rewards.tampering(opened)
        target = Target(TASK, TASK_ID, [healthy])
        put_mark(opened, run=healthy, target=target, why="<script>x</script> \x1b[31mred " + "long " * 40, by="me")
        page = render_html(build_report(opened, healthy))
    assert Page(page).open == [] and Page(page).scripts == 0 and "\x1b" not in page
    assert "Rewards in quarantine" in page and "Rewards that look wrong" in page and "&lt;script&gt;" in page
    assert "ratchet quarantine --episode" in page and "made with them or after them: 1 to 15" in page
    shown = ratchet("report", healthy).stdout
    assert max(map(len, shown.splitlines()[:-1])) <= 100 and "\x1b" not in shown
    for words in ("Rewards in quarantine", "Rewards that look wrong", "no command", "tampered", f"audit {healthy}"):
        assert words in " ".join(shown.split())


def test_an_audit_of_a_healthy_run_finds_nothing(healthy: str) -> None:
    assert ratchet("audit", healthy).stdout == f"{healthy}: no reward looks wrong\n"
    assert json.loads(ratchet("audit", healthy, "--json").stdout) == {"run": healthy, "findings": []}
    assert json.loads(ratchet("report", healthy, "--json").stdout)["rewards"]["findings"] == []


@pytest.mark.parametrize("plant", wrong_rewards.PLANTS, ids=lambda plant: plant.__name__)
def test_each_finding_comes_with_a_command_that_settles_it(
    home: Path, make_run: MakeRun, database: Engine, plant: Callable[[Session], wrong_rewards.Planted]
) -> None:
    run = make_run(steps=1)
    with session(database) as opened:
        planted = plant(opened)
    told = ratchet("audit", run, code=1).stdout
    assert planted.words in told and all(attempt in told for attempt in planted.attempts)
    (finding,) = json.loads(ratchet("audit", run, "--json", code=1).stdout)["findings"]
    assert finding["command"] in told.splitlines()[3] and finding["suspicion"] == planted.suspicion
    program, *argv = shlex.split(finding["command"])
    assert program == "ratchet"
    ratchet(*argv)
    assert ratchet("audit", run).stdout == f"{run}: no reward looks wrong\n"


def test_thresholds_of_a_file_of_limits_decide(home: Path, make_run: MakeRun, database: Engine, tmp_path: Path) -> None:
    run = make_run(steps=1)
    with session(database) as opened:
        wrong_rewards.short_verifier(opened)
    file = tmp_path / "limits.toml"
    file.write_text("[audit]\nverify_s = 60\n")
    assert "no reward looks wrong" in ratchet("audit", run, "--limits", str(file)).stdout
    file.write_text("[audit]\nspeed = 60\n")
    assert "there is no limit audit.speed" in ratchet("audit", run, "--limits", str(file), code=1).stderr
    assert "no run 'x'" in ratchet("audit", "x", code=1).stderr


def test_a_held_out_task_is_marked_and_no_run_counts_it_among_those_that_it_trains_on(
    home: Path, make_run: MakeRun, database: Engine
) -> None:
    make_run(steps=1, state="running")
    with session(database) as opened:
        opened.get_one(Task, TASK_ID).split = Split.HELD_OUT
    marked = json.loads(quarantine("--task", TASK_ID, "--json"))
    assert [mark["target"] for mark in marked["marks"]] == [TASK_ID]
    with session(database) as opened:
        target = find_task(opened, task=TASK_ID, run=RUN)
        order = _order(opened, opened.get_one(Run, RUN), [target])
    assert order.tasks == {} and order.released == []
