"""`ratchet report --check`: trouble that was planted into a run is named under its question, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Engine, delete
from sqlmodel import Session

from storage.database import session
from storage.report import build_report, render_html
from storage.report.limits import DEFAULTS, default_limits
from storage.tables import ServedEvaluation
from tests.lineage.commands import ratchet
from tests.storage.conftest import MakeRun
from tests.storage.troubles import TROUBLES, flaky_task, slow_group, unproven_engine

TOPICS = [
    "batch readiness",
    "policy freshness",
    "numeric alignment",
    "environment reliability",
    "weight publication",
    "evaluation",
]
Trouble = Callable[[Session], list[str]]


def test_a_healthy_run_passes_and_every_question_has_a_verdict(healthy: str) -> None:
    result = ratchet("report", healthy, "--check")
    assert result.stderr == ""
    answers = json.loads(ratchet("report", healthy, "--check", "--json").stdout)["readiness"]
    assert [item["topic"] for item in answers] == TOPICS
    assert [item["verdict"] for item in answers] == ["ready"] * 6
    assert all(item["question"].endswith("?") and item["why"] and item["figures"] for item in answers)


def test_what_was_not_measured_fails_a_strict_check_alone(healthy: str, database: Engine) -> None:
    with session(database) as opened:
        opened.exec(delete(ServedEvaluation))
    ratchet("report", healthy, "--check")
    result = ratchet("report", healthy, "--check", "--strict", code=1)
    (line,) = result.stderr.splitlines()
    assert line.startswith("not measured: evaluation: results are stored without the engine, dtype")
    ratchet("report", healthy, "--strict", code=2)


PLANTS = [pytest.param(topic, plant, id=plant.__name__) for topic, plants in TROUBLES.items() for plant in plants]


@pytest.mark.parametrize(("topic", "plant"), PLANTS)
def test_planted_trouble_is_named_under_its_question(
    healthy: str, database: Engine, topic: str, plant: Trouble
) -> None:
    with session(database) as opened:
        expected = plant(opened)
    result = ratchet("report", healthy, "--check", code=1)
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"not ready: {topic}: ")
    assert [words for words in expected if words not in line] == []
    shown = "".join(result.stdout.split())
    assert [words for words in expected if "".join(words.split()) not in shown] == []


def test_several_troubles_are_each_named_in_terminal_json_and_page(healthy: str, database: Engine) -> None:
    with session(database) as opened:
        words = [*slow_group(opened), *flaky_task(opened), *unproven_engine(opened)]
        page = render_html(build_report(opened, healthy))
    result = ratchet("report", healthy, "--check", "--json", code=1)
    assert [line.split(": ")[1] for line in result.stderr.splitlines()] == [TOPICS[0], TOPICS[3], TOPICS[4]]
    found = [item["topic"] for item in json.loads(result.stdout)["readiness"] if item["verdict"] == "not ready"]
    assert found == [TOPICS[0], TOPICS[3], TOPICS[4]]
    assert [word for word in words if word not in page] == []
    assert page.count('<details class="panel" open>') == 3


def test_without_check_a_run_that_is_not_ready_is_only_told(healthy: str, database: Engine) -> None:
    with session(database) as opened:
        slow_group(opened)
    assert "not ready" in ratchet("report", healthy).stdout


def test_a_run_without_an_update_is_not_measured_and_says_when_to_look_again(home: Path, make_run: MakeRun) -> None:
    run = make_run(steps=0, evaluations=False, state="running")
    answers = json.loads(ratchet("report", run, "--check", "--json").stdout)["readiness"]
    assert [item["verdict"] for item in answers] == ["not measured"] * 4 + ["ready", "not measured"]
    assert answers[0]["why"] == ["no batch was trained yet: look again after the first update"]
    (why,) = answers[5]["why"]
    assert why.startswith("there is no evaluation: set evaluation.tasks in run.json, or: temporal workflow start ")


def test_a_file_of_limits_overrides_what_it_names(healthy: str, tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text("[batch]\ntime_to_batch_s = 5\n[numerics]\nmismatch_kl = 1.5e-05\n")
    result = ratchet("report", healthy, "--check", "--limits", str(file), code=1)
    first, second = result.stderr.splitlines()
    assert "at most 5.0 s (batch.time_to_batch_s): most of it is " in first
    assert second.startswith("not ready: numeric alignment: mismatch_kl, worst batch ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[batch]\nspeed = 1\n", "there is no limit batch.speed; there in this table are: time_to_batch_s, "),
        ("[speed]\nx = 1\n", "there is no limit speed; there are: batch, freshness, numerics, environment, "),
        ("[batch]\ntail_share = 2.0\n", "batch.tail_share: Input should be less than or equal to 1 (given: 2.0)"),
        ("[batch]\nslow_steps = true\n", "batch.slow_steps: Input should be a valid integer (given: True)"),
        ("batch = 3\n", "batch: Input should be a valid dictionary or instance of BatchLimits (given: 3)"),
        ("[batch\n", "can't be read as limits: "),
    ],
)
def test_a_mistake_in_the_limits_is_named(healthy: str, tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(text)
    result = ratchet("report", healthy, "--limits", str(file), code=1)
    assert said in result.stderr and result.stdout == ""


def test_limits_that_are_not_there_are_named(healthy: str, tmp_path: Path) -> None:
    assert "No such file" in ratchet("report", healthy, "--limits", str(tmp_path / "x.toml"), code=1).stderr


def test_every_limit_has_a_default_with_a_sentence() -> None:
    lines = [line for line in DEFAULTS.read_text().splitlines() if "=" in line and not line.startswith("#")]
    assert all("  # " in line for line in lines)
    assert len(lines) == sum(len(table) for table in default_limits().model_dump().values())
