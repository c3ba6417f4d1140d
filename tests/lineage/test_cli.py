from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy import Engine

from storage import queries
from storage.database import session
from tests.lineage.commands import ratchet
from tests.storage import rows
from tests.storage.conftest import MakeRun

LONG = "a-run-of-" + "many-" * 40 + "words"


def test_a_runs_versions_are_listed_with_their_batches_and_rewards(home: Path, make_run: MakeRun) -> None:
    make_run(steps=2)
    out = ratchet("lineage", "shell-demo").stdout
    assert "shell-demo: finished, step 2" in out
    listed = [line.split()[:4] for line in out.splitlines() if "runs/shell-demo/" in line]
    assert listed == [["0", "-", "0", "0"], ["1", "shell-demo/b1", "64", "8"], ["2", "shell-demo/b2", "64", "8"]]


def test_a_version_lists_every_episode_that_trained_it_on_a_line_of_its_own(home: Path, make_run: MakeRun) -> None:
    make_run(steps=3)
    out = ratchet("lineage", "shell-demo", "--version", "2").stdout
    lines = [line.split() for line in out.splitlines() if line.strip().startswith("shell-demo/g")]
    assert len(lines) == len({line[0] for line in lines}) == 128
    assert {line[-1] for line in lines} == {"shell-demo/b1", "shell-demo/b2"}
    assert all("/a" in line[0] and line[1].startswith("shell/") for line in lines)


def test_an_episode_shows_its_turns_its_batch_and_the_versions_that_hold_it(home: Path, make_run: MakeRun) -> None:
    make_run(steps=3)
    out = ratchet("lineage", "--episode", "shell-demo/g9/e1/a0").stdout
    assert "shell-demo/b2 (step 2, published, advantage" in out
    assert "2 and later, up to 3" in out and out.count("wc -l < notes.txt") == 2


def test_an_episode_that_infrastructure_took_shows_its_other_attempts(home: Path, make_run: MakeRun) -> None:
    make_run(steps=7)
    (failure,) = json.loads(ratchet("report", "shell-demo", "--json").stdout)["failures"]
    lost = failure["example"].rpartition("/")[0]
    out = ratchet("lineage", "--episode", lost).stdout
    assert "attempt 3 of 3" in out and f"{lost}/a0: infra_failure, sandbox_lost" in out
    assert "no batch holds it" in out and "the daemon of host local went away" in out


@pytest.mark.parametrize("text", ["[/nope] [bold]x[/bold]", "a\x1b[31mred\x1b]0;own\x07"])
def test_what_a_model_answered_is_words_in_the_tables(
    home: Path, make_run: MakeRun, database: Engine, text: str
) -> None:
    make_run(steps=1)
    ended = rows.record("shell-demo/g0/e0/a9", reward=None).model_copy(
        update={"run": "shell-demo", "why": f"answered {text!s}; check: exit 1"}
    )
    with session(database) as opened:
        queries.put_episode(opened, record=ended)
    out = ratchet("lineage", "--episode", "shell-demo/g0/e0/a9").stdout
    assert "answered" in out and "check: exit 1" in out and "\x1b" not in out
    assert "[/nope] [bold]x[/bold]" in out or "nope" not in text


@pytest.mark.parametrize("argv", [("report", "shell-demo", "--check"), ("episode", "shell-demo/g0/e0/a0")])
@pytest.mark.parametrize("path", ["/proc/x.html", "/etc/hostname/x.html"])
def test_a_page_that_cannot_be_written_is_said_and_is_not_taken_for_a_verdict(
    home: Path, make_run: MakeRun, argv: tuple[str, ...], path: str
) -> None:
    make_run(steps=1)
    result = ratchet(*argv, "--html", path, code=2)
    assert f"{path}: the page can't be written" in result.stderr and "Traceback" not in result.stderr


def test_an_episode_shows_the_evidence_on_whose_doing_its_end_was(
    home: Path, make_run: MakeRun, database: Engine
) -> None:
    make_run(steps=1)
    ended = rows.record("shell-demo/g0/e0/a9", reward=None).model_copy(
        update={"run": "shell-demo", "evidence": {"blame": "host", "canary": "no answer within 20 s"}}
    )
    with session(database) as opened:
        queries.put_episode(opened, record=ended)
    out = ratchet("lineage", "--episode", "shell-demo/g0/e0/a9").stdout
    assert "evidence: canary" in out and "no answer within 20 s" in out


def test_the_version_that_a_run_began_with_has_no_episodes_and_that_is_said(home: Path, make_run: MakeRun) -> None:
    make_run(steps=1)
    assert "is where it began" in ratchet("lineage", "shell-demo", "--version", "0").stdout


def test_ids_are_never_broken_over_lines(home: Path, make_run: MakeRun) -> None:
    make_run(run=LONG, steps=1, groups=1)
    assert f"{LONG}/b1" in ratchet("lineage", LONG).stdout.split()
    assert f"{LONG}/g0/e7/a0" in ratchet("lineage", LONG, "--version", "1").stdout.split()
    assert f"{LONG}/b1" in ratchet("lineage", "--episode", f"{LONG}/g0/e0").stdout.split()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("lineage", "nope"), "no run 'nope'; the latest are: shell-demo"),
        (("lineage", "shell-demo", "--version", "9"), "has no version 9; it has 0, 1"),
        (("lineage", "--episode", "shell-demo/g77/e0"), "no episode 'shell-demo/g77/e0'"),
        (("report", "nope"), "no run 'nope'"),
        (("report", "nope", "--json"), "no run 'nope'"),
    ],
)
def test_what_is_not_there_ends_with_1_and_a_sentence(
    home: Path, make_run: MakeRun, argv: tuple[str, ...], said: str
) -> None:
    make_run(steps=1)
    result = ratchet(*argv, code=1)
    assert said in result.stderr and result.stdout == ""


def test_a_place_without_a_database_says_so_and_makes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path / "home"))
    assert "ratchet up" in ratchet("lineage", "r", code=1).stderr
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("argv", [(), ("r", "--episode", "r/g0/e0"), ("--episode", "r/g0/e0", "--version", "1")])
def test_wrong_usage_ends_with_2(argv: tuple[str, ...]) -> None:
    ratchet("lineage", *argv, code=2)


def test_the_json_report_is_all_that_is_printed_and_says_what_evaluation_gained(home: Path, make_run: MakeRun) -> None:
    make_run(steps=9)
    found = json.loads(ratchet("report", "shell-demo", "--json").stdout)
    assert 0 < found["evaluation"]["first"] < found["evaluation"]["last"] < 1
    assert [step["step"] for step in found["steps"]] == list(range(1, 10))
    assert not (home / "reports").exists()


def test_the_page_goes_to_the_state_folder_or_where_it_is_told_and_its_path_is_printed(
    home: Path, make_run: MakeRun, tmp_path: Path
) -> None:
    make_run(run="team/a", steps=1)
    path = Path(ratchet("report", "team/a").stdout.splitlines()[-1])
    assert path.parent == home.resolve() / "reports" and path.name.startswith("team-a-")
    assert "team/a" in path.read_text()
    for run in ("team-a", "team a"):
        make_run(run=run, steps=1)
        other = Path(ratchet("report", run).stdout.splitlines()[-1])
        assert other != path and "team/a" not in other.read_text()
    told = tmp_path / "deep" / "page.html"
    assert ratchet("report", "team/a", "--html", str(told)).stdout.splitlines()[-1] == str(told)
    both = ratchet("report", "team/a", "--json", "--html", str(told))
    assert json.loads(both.stdout)["run"] == "team/a" and str(told) in both.stderr
