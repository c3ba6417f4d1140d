"""Sandboxes on two hosts, each with a Docker daemon of its own: one dies in mid-run with all that lives on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from sqlmodel import select

from activities.sandbox.boxes import Boxes
from storage.database import session
from storage.tables import Episode
from tests.account import assert_complete
from tests.stack import PROJECT, Stack, small_run, wait_for
from workers.stack.private_daemon import PrivateDaemon, may_start_one

pytestmark = [pytest.mark.drills, pytest.mark.timeout(2400)]

HOSTS = {"a": 8, "b": 16}
"""Sandboxes that may live at once."""
GIVEN_UP_S = 90
"""Within this after the death of a host, nobody waits for it any more."""


class SandboxHost:
    """One host: a state folder, a daemon and the part `sandbox`, as `ratchet up` starts it on a machine of its own."""

    def __init__(self, name: str, stack: Stack, home: Path) -> None:
        self.name, self.home = name, home
        home.mkdir()
        self.daemon = PrivateDaemon()
        self.env = {name: value for name, value in stack.env.items() if name != "RATCHET_HOME"} | {
            "RATCHET_HOME": str(home),
            "RATCHET_HOST": name,
            "RATCHET_SANDBOX_HOSTS": ",".join(HOSTS),
            "RATCHET_SANDBOX_SLOTS": str(HOSTS[name]),
            "RATCHET_SANDBOX_POOL": "0",
            "RATCHET_TEMPORAL_ADDRESS": f"127.0.0.1:{stack.ports['temporal']}",
            "RATCHET_DOCKER_HOST": self.daemon.host,
        }

    def ratchet(self, *argv: str) -> str:
        done = subprocess.run(
            ["ratchet", *argv], env=self.env, cwd=PROJECT, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, f"{argv}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def up(self) -> None:
        self.daemon.start()
        self.ratchet("up", "--parts", "sandbox")

    def agents(self) -> list[str]:
        """Attempts that have a sandbox here."""
        found = Boxes(self.home / "sandboxes").all(0.0).values()
        return [item.labels["ratchet.attempt"] for item in found if item.labels.get("ratchet.kind") == "agent"]

    def containers(self) -> list[str]:
        """Those of all kinds, running or not, as the daemon lists them."""
        command = ["docker", "-H", self.daemon.host, "ps", "-aq"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()

    def die(self) -> None:
        """As if its power went: the supervisor, the worker, the daemon and every container, with no word to anybody."""
        told = json.loads((self.home / "status.json").read_text())
        inspect = ["docker", "-H", self.daemon.host, "inspect", "-f", "{{.State.Pid}}", *self.containers()]
        inside = subprocess.run(inspect, capture_output=True, text=True, timeout=60, check=False).stdout.split()
        workers = [part["pid"] for part in told["parts"] if part["pid"]]
        for pid in (told["supervisor_pid"], *workers):
            os.kill(pid, signal.SIGKILL)
        self.daemon.kill()
        for pid in filter(int, inside):
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def close(self) -> None:
        self.ratchet("down")
        self.daemon.stop()


@pytest.fixture
def hosts(stack: Stack, tmp_path: Path) -> Iterator[dict[str, SandboxHost]]:
    if not may_start_one():
        pytest.skip("two Docker daemons need root, dockerd and containerd")
    with ExitStack() as opened:
        opened.enter_context(stack.restarted(RATCHET_SANDBOX_HOSTS=",".join(HOSTS)))
        made = {}
        for name in HOSTS:
            made[name] = SandboxHost(name, stack, tmp_path / name)
            opened.callback(made[name].close)
            made[name].up()
        yield made


def test_a_host_that_dies_in_mid_run_costs_its_episodes_an_attempt_and_the_run_ends_right(
    stack: Stack, hosts: dict[str, SandboxHost]
) -> None:
    run, a, b = "two-hosts", hosts["a"], hosts["b"]
    assert "draining, 0 of 8 sandboxes in use" in stack.ratchet("drain", "a").stdout
    listed = stack.ratchet("status").stdout
    assert "sandbox host a: draining, 0 of 8" in listed and "sandbox host b: 0 of 16" in listed
    assert "draining, 0 of 8" in a.ratchet("status")
    stack.start(run, small_run(mode="sync", evaluation={"tasks": 0}, training={"steps": 3}))
    wait_for(lambda: len(b.agents()) >= 4, 500, lambda: str(stack.status(run)))
    assert not a.agents(), "a drained host has a sandbox"
    stack.ratchet("drain", "a", "--undo")
    wait_for(lambda: stack.status(run).get("step", 0) >= 1 and len(b.agents()) >= 4, 400, lambda: str(b.agents()))
    b.die()
    died = time.time()
    silent = stack.ratchet("status", check=False)
    assert silent.returncode == 1 and "sandbox host b: silent" in silent.stdout
    stack.finish(run, 900)
    assert_complete(stack, run, steps=3)
    with session(stack.database()) as opened:
        rows = list(opened.exec(select(Episode).where(Episode.run == run)))
        opened.expunge_all()
    lost = [row for row in rows if row.outcome == "infra_failure"]
    assert lost and {(row.stop_reason, row.host) for row in lost} == {("sandbox_lost", "b")}
    assert all(row.why.startswith("host b: it takes up nothing any more") for row in lost)
    late = max(row.ended_at for row in lost) - died
    print(f"{len(lost)} of {len(rows)} attempts lost; the last was given up {late:.1f} s after the death of its host")
    assert late < GIVEN_UP_S
    assert {row.host for row in rows if row.started_at > died and row.outcome.startswith("model_")} == {"a"}
    checked = stack.ratchet("report", run, "--check", check=False)
    assert checked.returncode == 1 and f"sandbox at b ({len(lost)})" in checked.stderr
    if len(lost) > 1:
        assert "dead hosts 1" in checked.stderr and "b lost its last" in checked.stderr
    b.daemon.start()
    assert b.containers(), "it left nothing to clear away"
    b.ratchet("up")
    wait_for(lambda: not b.containers() and not b.agents(), 60, lambda: str(b.agents()))
    assert not a.containers()
    for host in (a, b):
        assert not [name for name in ("ratchet.db", "secrets.json") if (host.home / name).exists()], "it has keys"
