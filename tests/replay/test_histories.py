"""Recorded histories against today's code: an execution that began before a deploy goes on after it.

A failure here means that the change breaks every workflow that is open now; docs/operations.md says what to do.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer
from temporalio.workflow import NondeterminismError

from tests.replay import changed
from tests.replay.changed import ReplayedEpisode
from workers.temporal import plugin
from workflows import registry
from workflows.episode import Episode

FOLDER = Path(__file__).parent / "histories"
LONGEST_S = 30
HISTORIES = sorted(FOLDER.glob("*/*.json"))
PATHS = {
    "TrainingRun": {"continued-as-new", "finished", "async", "cancelled", "refused", "oversampled", "drawn"},
    "Group": {"replacement", "short", "cancelled", "spare-sibling", "surplus"},
    "Episode": {
        "success",
        "max-turns",
        "malformed",
        "reminded",
        "lost-sandbox",
        "no-sandbox",
        "cancelled",
        "surplus",
        "elsewhere",
    },
    "Evaluation": {"evaluation", "asked"},
    "Janitor": {""},
    "SandboxHost": {""},
}
"""What must be recorded of each workflow, as the ends of the files' names."""


def history(path: Path) -> WorkflowHistory:
    content = json.loads(path.read_text())
    return WorkflowHistory.from_json(content.pop("workflow_id"), content)


def type_of(path: Path) -> str:
    first = history(path).events[0].workflow_execution_started_event_attributes
    return first.workflow_type.name


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


async def replay(path: Path, workflows: list[type[Any]]) -> None:
    """In the sandbox and with the converter that the workers have. Raises NondeterminismError."""
    async with asyncio.timeout(LONGEST_S):
        await Replayer(workflows=workflows, plugins=[plugin()]).replay_workflow(history(path))


@pytest.mark.parametrize("path", HISTORIES, ids=name_of)
async def test_a_recorded_history_replays_against_todays_code(path: Path) -> None:
    await replay(path, [ReplayedEpisode if item is Episode else item for item in registry.ALL])


@pytest.mark.parametrize("path", [path for path in HISTORIES if path.parent.name == "current"], ids=name_of)
async def test_a_workflow_with_one_activity_more_is_noticed(path: Path) -> None:
    """F48."""
    with pytest.raises(NondeterminismError, match="TMPRL1100"):
        await replay(path, changed.ALL)


def test_every_workflow_and_each_of_its_ways_is_recorded() -> None:
    found: dict[str, set[str]] = {name: set() for name in PATHS}
    for path in FOLDER.glob("current/*.json"):
        found[type_of(path)].add(path.stem)
    assert PATHS.keys() == {getattr(item, "__temporal_workflow_definition").name for item in registry.ALL}
    for name, ways in PATHS.items():
        assert not {way for way in ways if not any(stem.endswith(way) for stem in found[name])}, name


def test_a_history_is_small_and_names_no_machine() -> None:
    for path in HISTORIES:
        text = path.read_text()
        assert len(text) < 160_000, f"{path.name}: {len(text)} bytes"
        identities = set(re.findall(r'"identity":"([^"]*)"', text))
        assert identities <= {"recorder", "history-service"}, path.name
        assert "stackTrace" not in text
