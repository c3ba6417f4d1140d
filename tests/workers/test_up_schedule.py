"""What `ratchet up` leaves on the Temporal server: the janitor's schedule."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.workers.test_stack import Cli
from workers.stack.parts import tool
from workers.stack.state import Home


def test_up_gives_the_janitor_its_schedule_and_up_again_leaves_it_as_the_operator_did(tmp_path: Path) -> None:
    cli = Cli(Home(tmp_path / "home"))
    try:
        cli("up", "--parts=temporal,s3,prepare", *cli.options)
        assert schedule(cli)["schedule"]["action"]["startWorkflow"]["workflowType"]["name"] == "Janitor"
        temporal(cli, "schedule", "toggle", "--schedule-id", "ratchet-janitor", "--pause", "--reason", "maintenance")
        cli("down")
        cli("up")
        assert schedule(cli)["schedule"]["state"] == {"paused": True, "notes": "maintenance"}
    finally:
        cli("down")


def schedule(cli: Cli) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        temporal(cli, "schedule", "describe", "--schedule-id", "ratchet-janitor", "-o", "json")
    )
    return found


def temporal(cli: Cli, *words: str) -> str:
    command = [tool("temporal"), "--address", f"127.0.0.1:{cli.ports[0]}", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
