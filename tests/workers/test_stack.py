"""The real thing: `ratchet up` in a folder of its own, with the servers that need no other part of the project."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from workers.stack.ports import free_ports
from workers.stack.process import read_pid_file
from workers.stack.state import Home

PORTS = ("temporal", "temporal-http", "temporal-metrics", "ui", "s3")


class Cli:
    """The `ratchet` command in one state folder."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.ports = free_ports(len(PORTS))
        self.options = [f"--{name}-port={port}" for name, port in zip(PORTS, self.ports, strict=True)]
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("RATCHET_")}
        self.env |= {"RATCHET_HOME": str(home.path)}

    def __call__(self, *arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-c", "from workers.cli import app; app()", *arguments]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def pid(self, part: str) -> int | None:
        process = read_pid_file(self.home.pid_file(part))
        return process.pid if process is not None and process.alive else None

    def supervisor(self) -> int:
        process = read_pid_file(self.home.lock)
        assert process is not None
        return process.pid

    def until(self, well: bool) -> dict[str, dict[str, object]]:
        deadline = time.monotonic() + 30
        while True:
            done = subprocess.run(
                [sys.executable, "-c", "from workers.cli import app; app()", "status", "--json"],
                env=self.env,
                capture_output=True,
                text=True,
                check=False,
            )
            if (done.returncode == 0) == well:
                return {part["name"]: part for part in json.loads(done.stdout)["parts"]}
            assert time.monotonic() < deadline, done.stdout
            time.sleep(0.1)


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    made = Cli(Home(tmp_path_factory.mktemp("stack") / "home"))
    made("up", "--parts=temporal,s3", *made.options)
    yield made
    made("down")
    assert not list(made.home.pids.iterdir())
    assert "already down" in made("down")


def test_up_again_says_so_and_where_everything_is(cli: Cli) -> None:
    before = cli.supervisor()
    said = cli("up")
    assert "already up" in said
    assert f"127.0.0.1:{cli.ports[0]}" in said
    assert cli.supervisor() == before


def test_up_with_other_options_is_refused_while_it_is_up(cli: Cli) -> None:
    assert "ratchet down" in cli("up", "--engines=3", code=1)


def test_status_shows_every_part_as_healthy(cli: Cli) -> None:
    parts = cli.until(well=True)
    assert {name: part["state"] for name, part in parts.items()} == {"temporal": "healthy", "s3": "healthy"}
    assert "healthy" in cli("status")


def test_nothing_listens_but_on_the_loopback_address(cli: Cli) -> None:
    for part in ("temporal", "s3"):
        pid = cli.pid(part)
        assert pid is not None
        listening = [c for c in psutil.Process(pid).net_connections() if c.status == psutil.CONN_LISTEN]
        assert listening
        assert {connection.laddr.ip for connection in listening} == {"127.0.0.1"}


def test_no_secret_is_in_a_log_or_a_command_line(cli: Cli) -> None:
    secret = cli.home.load_keys()["s3_secret_key"]
    for log in cli.home.logs.iterdir():
        assert secret not in log.read_text()
    for process in psutil.process_iter(["cmdline"]):
        assert secret not in " ".join(process.info["cmdline"] or [])


def test_the_object_store_takes_the_keys_and_no_others(cli: Cli) -> None:
    from storage.objects import ObjectStore
    from workflows.errors import StorageError

    keys = cli.home.load_keys()

    def connect(secret: str) -> ObjectStore:
        return ObjectStore.connect(
            endpoint=f"http://127.0.0.1:{cli.ports[4]}",
            bucket="ratchet",
            region="us-east-1",
            access_key=keys["s3_access_key"],
            secret_key=secret,
        )

    store = connect(keys["s3_secret_key"])
    store.ensure_bucket()
    store.put("a/b", b"x")
    assert store.get("a/b") == b"x"
    with pytest.raises(StorageError):
        connect("wrong").get("a/b")


def test_a_killed_server_is_back_in_a_moment_and_the_restart_is_told(cli: Cli) -> None:
    old = cli.pid("temporal")
    assert old is not None
    os.kill(old, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while cli.pid("temporal") in (None, old) and time.monotonic() < deadline:
        time.sleep(0.05)
    parts = cli.until(well=True)
    assert parts["temporal"]["pid"] != old
    assert parts["temporal"]["restarts"] == 1
    assert "SIGKILL" in cli.home.log("supervisor").read_text()


def test_a_killed_supervisor_costs_no_part_its_life(cli: Cli) -> None:
    server, store = cli.pid("temporal"), cli.pid("s3")
    os.kill(cli.supervisor(), signal.SIGKILL)
    parts = cli.until(well=False)
    assert parts["temporal"]["state"] == "unsupervised"
    assert cli("up").startswith("up")
    assert (cli.pid("temporal"), cli.pid("s3")) == (server, store)


def test_up_after_a_reboot_needs_no_options(cli: Cli) -> None:
    cli("down")
    assert cli.pid("temporal") is None
    assert "down" in cli("status", code=1)
    said = cli("up")
    assert f"127.0.0.1:{cli.ports[4]}" in said


def test_down_ends_what_a_killed_supervisor_left(cli: Cli) -> None:
    os.kill(cli.supervisor(), signal.SIGKILL)
    said = cli("down")
    assert "ending temporal" in said
    assert not list(cli.home.pids.iterdir())
    cli("up")


def test_a_taken_port_stops_up_before_anything_starts(cli: Cli, tmp_path: Path) -> None:
    other = Cli(Home(tmp_path / "other"))
    said = other("up", "--parts=s3", f"--s3-port={cli.ports[4]}", code=1)
    assert f"port {cli.ports[4]} for s3 is taken by rclone" in said
    assert "RATCHET_S3_PORT" in said
    assert not other.home.lock.exists()


def test_env_points_the_temporal_command_at_this_stack(cli: Cli) -> None:
    assert f"export TEMPORAL_ADDRESS=127.0.0.1:{cli.ports[0]}" in cli("env")


def test_a_part_that_does_not_come_up_is_named_with_the_end_of_its_log(cli: Cli, tmp_path: Path) -> None:
    other = Cli(Home(tmp_path / "other"))
    other.env["RATCHET_DATABASE_URL"] = "nonsense://"
    try:
        said = other("up", "--parts=prepare", code=1)
        assert "prepare does not come up: exit 1" in said
        assert "prepare.log" in said
    finally:
        other("down")
