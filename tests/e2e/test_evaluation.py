"""Evaluations that somebody asks for, on real parts: alone, by a schedule, and beside the run's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.stack import Stack, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def ask(stack: Stack, workflow_id: str, request: dict[str, Any]) -> None:
    stack.temporal(
        *("workflow", "start", "--task-queue", "episodes", "--type", "Evaluation"),
        *("--workflow-id", workflow_id, "--input", json.dumps(request)),
    )


def told(stack: Stack, *argv: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(stack.ratchet("evaluation", *argv, "--json").stdout)
    return found


def test_a_past_version_is_evaluated_alone_and_compared_with_the_runs_own(stack: Stack, straight: str) -> None:
    own = told(stack, straight)
    assert own["in_run"] and own["state"] == "finished" and own["reward"]["tasks"] == 8
    assert own["fields"]["engine"] == "vllm" and own["fields"]["dtype"] == "float32" and own["fields"]["engine_version"]
    ask(stack, "greedy", {"run": straight, "samples_per_task": 2, "sampling": {"temperature": 0}})
    stack.finish("greedy")
    alone = told(stack, "greedy")
    assert (alone["id"], alone["version"], alone["episodes"]) == (f"{straight}/greedy", own["version"], 16)
    assert alone["pass_at"]["2"]["mean"] >= alone["pass_at"]["1"]["mean"]
    assert alone["fields"]["weights"] == own["fields"]["weights"] and not alone["stale"]
    compared = told(stack, own["id"], "--against", "greedy")
    assert [change["field"] for change in compared["changes"]] == ["temperature"]
    assert compared["difference"]["tasks"] == 8 and not compared["weights_differ"]
    # The engines are free again, and the run's own result is of other sampling than the newest.
    assert [change["field"] for change in told(stack, own["id"])["stale"]] == ["temperature"]


def test_one_by_a_schedule_has_the_fingerprint_and_the_result_of_the_runs_own(stack: Stack, straight: str) -> None:
    stack.temporal(
        *("schedule", "create", "--schedule-id", "nightly", "--cron", "0 3 1 1 *", "--task-queue", "episodes"),
        *("--type", "Evaluation", "--workflow-id", "nightly", "--input", json.dumps({"run": straight})),
    )
    stack.temporal("schedule", "trigger", "--schedule-id", "nightly")
    listed: list[str] = []

    def ended() -> bool:
        found = stack.temporal("workflow", "list", "--query", "WorkflowType = 'Evaluation'", "-o", "json").stdout
        listed[:] = [item["execution"]["workflowId"] for item in json.loads(found)]
        return any(name.startswith("nightly-") for name in listed)

    wait_for(ended, 60, lambda: str(listed))
    (name,) = (item for item in listed if item.startswith("nightly-"))
    stack.finish(name)
    again = told(stack, name)
    own = next(
        item
        for item in json.loads(stack.ratchet("report", straight, "--json").stdout)["evaluation"]["measured"]
        if item["in_run"] and item["version"] == again["version"]
    )
    assert again["fingerprint"] == own["fingerprint"] and again["reward"] == own["reward"]


def test_a_mistake_in_a_request_ends_it_at_once(stack: Stack, straight: str) -> None:
    ask(stack, "mistaken", {"run": straight, "version": 99, "tasks": 8})
    wait_for(lambda: stack.closed("mistaken")[0] == "FAILED", 30)
    assert f"version: run '{straight}' has published no version 99" in stack.closed("mistaken")[1]
