"""One real stack for the end-to-end and the chaos tests: its own folder and ports, the tiny policy, all real."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from activities.sandbox.boxes import CONTAINER, Boxes
from storage.database import open_database
from storage.objects import ObjectStore

BIN = Path(sys.executable).parent
DISK_MB = 1024
ENGINES = int(os.environ.get("CHAOS_ENGINES", "1"))
PROJECT = Path(__file__).resolve().parents[1]


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
        self.ratchet("up", "--engines", str(ENGINES), *ports)

    @contextmanager
    def restarted(self, **variables: str) -> Iterator[None]:
        """Up with these variables in its environment, and back."""
        self.ratchet("down")
        self.env |= variables
        try:
            self.up()
            yield
        finally:
            # Empty, since the stack remembers some of them.
            self.env |= dict.fromkeys(variables, "")
            self.ratchet("down")
            self.up()
            for name in variables:
                del self.env[name]

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

    def supervised(self) -> dict[str, Any]:
        """What the supervisor says of its parts. Its own file: asking by command costs a second of a busy core."""
        told: dict[str, Any] = json.loads((self.home / "status.json").read_text())
        return told

    def pid(self, part: str) -> int | None:
        found: int | None = next(item["pid"] for item in self.supervised()["parts"] if item["name"] == part)
        return found

    def kill(self, part: str) -> None:
        pid = self.pid(part)
        assert pid is not None, f"{part} has no process of the stack"
        os.kill(pid, signal.SIGKILL)

    def database(self) -> Engine:
        return open_database(f"sqlite:///{self.home / 'ratchet.db'}")

    def store(self) -> ObjectStore:
        keys = json.loads((self.home / "secrets.json").read_text())
        return ObjectStore.connect(
            endpoint=f"http://127.0.0.1:{self.ports['s3']}",
            bucket="ratchet",
            region="us-east-1",
            access_key=keys["s3_access_key"],
            secret_key=keys["s3_secret_key"],
        )

    def containers(self, run: str) -> list[str]:
        """Those of the run: what was started for it, and what its sandboxes' folders name."""
        out = self._docker_ps(run, "{{.ID}}")
        return out.split() + [labels.get(CONTAINER, name) for name, labels in self.sandboxes(run).items()]

    def listed(self, run: str) -> str:
        """What the daemon says of the run's containers, with their labels."""
        return self._docker_ps(run, "{{.Names}} {{.Status}} {{.Labels}}")

    def _docker_ps(self, run: str, shown: str) -> str:
        """Of this stack's containers: the daemon's folder outlives a stack that was killed with its run."""
        stack = hashlib.sha256(str(self.home.resolve()).encode()).hexdigest()[:12]
        labels = ["--filter", f"label=ratchet.run={run}", "--filter", f"label=ratchet.stack={stack}"]
        return self.run("docker", "ps", "-a", *labels, "--format", shown).stdout

    def sandboxes(self, run: str) -> dict[str, dict[str, str]]:
        """The labels of the run's sandboxes, by id."""
        found = Boxes(self.home / "sandboxes").all(0.0)
        return {name: folder.labels for name, folder in found.items() if folder.labels.get("ratchet.run") == run}


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
    with small_disk(made.home / "s3"):
        # The policy needs no stack: it is made while the engines start.
        policy = subprocess.Popen(["ratchet", "bootstrap", "tiny"], env=made.env, cwd=PROJECT)
        try:
            made.up()
            assert policy.wait(400) == 0
            yield made
        finally:
            policy.kill()
            policy.wait()
            made.ratchet("down", check=False)


LONG = "CHAOS_STEPS" in os.environ
"""`make chaos`."""
STEPS = int(os.environ.get("CHAOS_STEPS", "3"))


@pytest.fixture(scope="session")
def straight(stack: Stack) -> str:
    """A synchronous run that nobody disturbs; it crosses continue-as-new at each step."""
    stack.start("straight", straight_run())
    stack.finish("straight", 3600)
    return "straight"


def straight_run() -> dict[str, Any]:
    evaluation = {"tasks": 0 if LONG else 8}
    return small_run(mode="sync", continue_as_new_every=1, evaluation=evaluation, training={"steps": STEPS})


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """`folder` on a file system of its own where we may mount one: it can be filled without hurting anybody."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m,mode=0700", "ratchet-test", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(command, check=False).returncode == 0
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def small_run(**changes: Any) -> dict[str, Any]:
    """The demo's run, cut to a few small steps. The policy learns slowly: it would soon solve every task, and a step
    would need ever more groups."""
    config: dict[str, Any] = json.loads((PROJECT / "examples/runs/shell.json").read_text())
    config["rollout"] |= {"group_size": 4, "groups_per_batch": 4 if LONG else 2, "refill": 4}
    config["training"] |= {"steps": 3, "learning_rate": 1e-5, "final_learning_rate": 1.0}
    config["evaluation"] = {"tasks": 8}
    for name, value in changes.items():
        config[name] = config.get(name, {}) | value if isinstance(value, dict) else value
    return config
