"""The example with an HTTP API beside the sandbox, trained on real parts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlmodel import col, select

from storage.database import session
from storage.tables import Episode
from tests.account import assert_complete
from tests.stack import PROJECT, Stack, wait_for

pytestmark = [pytest.mark.drills, pytest.mark.timeout(900)]

STEPS = 3


def api_run() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((PROJECT / "examples/runs/api.json").read_text())
    assert config["training"]["steps"] == STEPS
    return config | {"taskset": str(PROJECT / config["taskset"]), "evaluation": {"tasks": 0}}


def services(stack: Stack, run: str) -> int:
    """Containers of services of the run that the daemon knows."""
    return stack.listed(run).count("ratchet.kind=service")


def test_the_api_example_trains_for_three_steps_with_its_services(stack: Stack) -> None:
    run, taskset = "api", "examples/tasks/api"
    stack.ratchet("bootstrap", "tiny", "--tasks", taskset, timeout=400)
    stack.start(run, api_run())
    wait_for(lambda: services(stack, run) > 0, 200, lambda: str(stack.status(run)))
    stack.finish(run)
    assert_complete(stack, run, steps=STEPS)
    assert services(stack, run) == 0
    with session(stack.database()) as opened:
        episodes = opened.exec(select(Episode).where(col(Episode.run) == run)).all()
    outcomes = {episode.outcome for episode in episodes}
    assert {"model_success", "model_failure"} <= outcomes and "infra_failure" not in outcomes, outcomes
