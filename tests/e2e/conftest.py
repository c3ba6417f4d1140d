"""One real stack for all end-to-end tests: its own state folder and ports, the tiny policy, everything real."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from storage.database import open_database

BIN = Path(sys.executable).parent
PROJECT = Path(__file__).resolve().parents[2]


class Stack:
    """The commands as a person types them, against the test's own stack."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("RATCHET_", "TEMPORAL_"))}
        self.env |= {"RATCHET_HOME": str(home), "PATH": f"{BIN}:{os.environ['PATH']}"}
        names = ("temporal", "temporal-http", "temporal-metrics", "ui", "s3", "engine")
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.env["TEMPORAL_ADDRESS"] = f"127.0.0.1:{self.ports['temporal']}"

    def run(self, *argv: str, timeout: float = 300, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            argv, env=self.env, cwd=PROJECT, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert not check or done.returncode == 0, f"{argv}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def ratchet(self, *argv: str, timeout: float = 300, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run("ratchet", *argv, timeout=timeout, check=check)

    def temporal(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run("temporal", *argv, timeout=60, check=check)

    def up(self) -> None:
        ports = [item for name, port in self.ports.items() for item in (f"--{name}-port", str(port))]
        self.ratchet("up", "--engines", "1", *ports)

    def start(self, run: str, config: dict[str, Any]) -> None:
        path = self.home / f"{run}.json"
        path.write_text(json.dumps(config))
        self.temporal(
            *("workflow", "start", "--task-queue", "control", "--type", "TrainingRun"),
            *("--workflow-id", run, "--input-file", str(path)),
        )

    def status(self, run: str) -> dict[str, Any]:
        """The answer of the `status` query; empty while nobody answers, as during a restart."""
        done = self.temporal("workflow", "query", "-w", run, "--type", "status", "-o", "json", check=False)
        if done.returncode != 0:
            return {}
        answer: dict[str, Any] = json.loads(done.stdout)["queryResult"][0]
        return answer

    def closed(self, run: str) -> tuple[str, str]:
        """(status, failure message) of the run's workflow; status RUNNING while it runs, empty while nobody answers."""
        done = self.temporal("workflow", "describe", "-w", run, "-o", "json", check=False)
        if done.returncode != 0:
            return "", ""
        status = json.loads(done.stdout)["workflowExecutionInfo"]["status"].removeprefix("WORKFLOW_EXECUTION_STATUS_")
        if status != "FAILED":
            return status, ""
        shown = json.loads(self.temporal("workflow", "show", "-w", run, "-o", "json").stdout)
        failure = shown["events"][-1]["workflowExecutionFailedEventAttributes"]["failure"]
        return status, failure["message"]

    def finish(self, run: str, seconds: float = 400) -> None:
        """Wait until the run has completed."""
        wait_for(lambda: self.closed(run)[0] not in ("", "RUNNING"), seconds, lambda: str(self.status(run)))
        status, message = self.closed(run)
        assert status == "COMPLETED", f"{run}: {status} {message}"

    def pid(self, part: str) -> int | None:
        parts = json.loads(self.ratchet("status", "--json", check=False).stdout)["parts"]
        found: int | None = next(item["pid"] for item in parts if item["name"] == part)
        return found

    def kill(self, part: str) -> None:
        pid = self.pid(part)
        assert pid is not None, f"{part} has no process of the stack"
        os.kill(pid, signal.SIGKILL)

    def database(self) -> Engine:
        return open_database(f"sqlite:///{self.home / 'ratchet.db'}")

    def containers(self, run: str) -> list[str]:
        out = self.run("docker", "ps", "-aq", "--filter", f"label=ratchet.run={run}")
        return out.stdout.split()


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for opened in sockets:
        opened.bind(("127.0.0.1", 0))
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports


def wait_for(condition: Callable[[], bool], seconds: float, describe: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {describe()}"
        time.sleep(0.5)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    made = Stack(tmp_path_factory.mktemp("stack") / "home")
    made.home.mkdir()
    made.up()
    try:
        made.ratchet("bootstrap", "tiny", timeout=400)
        yield made
    finally:
        made.ratchet("down", check=False)


def small_run(**changes: Any) -> dict[str, Any]:
    """The demo's run, cut to a few small steps."""
    config: dict[str, Any] = json.loads((PROJECT / "examples/runs/shell.json").read_text())
    config["rollout"] |= {"group_size": 4, "groups_per_batch": 4, "refill": 4}
    config["training"] |= {"steps": 3}
    config["evaluation"] = {"tasks": 8}
    for name, value in changes.items():
        config[name] = config.get(name, {}) | value if isinstance(value, dict) else value
    return config
