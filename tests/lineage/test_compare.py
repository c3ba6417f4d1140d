"""`ratchet compare`: what differs between runs, in figures and in configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy import Engine

from storage.database import session
from storage.tables import Run
from tests.lineage.commands import ratchet
from tests.storage.conftest import MakeRun


@pytest.fixture
def two(home: Path, make_run: MakeRun, database: Engine) -> None:
    """A longer run, and a shorter one with other settings that has failed."""
    make_run(run="long", steps=4)
    make_run(run="short", steps=2, evaluations=False, state="failed", reason="TrainerFailed: nan")
    with session(database) as opened:
        row = opened.get_one(Run, "short")
        row.config = row.config | {
            "seed": 3,
            "training": {"steps": 15, "deepspeed": {"zero_optimization": {"stage": 2}}},
        }
        opened.add(row)


@pytest.mark.usefixtures("two")
def test_the_figures_of_runs_stand_side_by_side() -> None:
    out = ratchet("compare", "long", "short").stdout
    lines = {" ".join(line.split()) for line in out.splitlines()}
    assert {"steps 4 of 15 2 of 15", "time per step 21.0 s 21.0 s", "failures that were ours 0% 0%"} <= lines
    assert {"episodes 264 128", 'training.deepspeed {} {"zero_optimization": {"stage": 2}}', "seed 0 3"} <= lines
    assert "failed: TrainerFailed: nan" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.usefixtures("two")
def test_json_has_every_figure_and_only_the_fields_of_the_configuration_that_differ() -> None:
    made = json.loads(ratchet("compare", "long", "short", "--json").stdout)
    first, second = made["runs"]
    assert (first["run"], second["run"], second["state"]) == ("long", "short", "failed")
    assert first["evaluation_first"] is not None and second["evaluation_first"] is None
    assert first["episodes"] == 4 * 64 + 8 and first["groups_trained"] == 32
    assert set(first["time_parts_s"]) == set(second["time_parts_s"]) and first["tail_s"] > 0
    assert made["config"] == {"seed": [0, 3], "training.deepspeed": [{}, {"zero_optimization": {"stage": 2}}]}


def test_runs_of_one_configuration_are_said_to_be(home: Path, make_run: MakeRun) -> None:
    for run in ("a", "b", "c"):
        make_run(run=run, steps=1, groups=1)
    out = ratchet("compare", "a", "b", "c").stdout
    assert "the configurations are the same" in out and out.splitlines()[1].split() == ["a", "b", "c"]


def test_runs_without_an_update_compare(home: Path, make_run: MakeRun) -> None:
    for run in ("a", "b"):
        make_run(run=run, steps=0, evaluations=False, state="running")
    made = json.loads(ratchet("compare", "a", "b", "--json").stdout)
    assert [one["seconds_per_step"] for one in made["runs"]] == [None, None]
    assert "0 of 15" in ratchet("compare", "a", "b").stdout


@pytest.mark.parametrize("argv", [("a",), ("a", "a"), ()])
def test_fewer_than_two_runs_are_no_comparison(home: Path, make_run: MakeRun, argv: tuple[str, ...]) -> None:
    make_run(run="a", steps=0)
    ratchet("compare", *argv, code=2)


def test_a_run_that_is_not_there_is_named(home: Path, make_run: MakeRun) -> None:
    make_run(run="a", steps=0)
    assert "no run 'b'; the latest are: a" in ratchet("compare", "a", "b", code=1).stderr
