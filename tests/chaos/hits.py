"""What chaos does to a stack. Each hit is real, and those that last give back what they took."""

from __future__ import annotations

import http.server
import os
import random
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from activities.sandbox.boxes import CONTAINER
from tests.stack import Stack

HOLD_S = 4.0
"""How long a hit that lasts goes on."""
PROCESSES = ("engine", "rollout", "control", "trainer", "engines", "temporal", "s3", "docker")


class Hits:
    """On `run`. `attempts` are those whose sandbox was taken away."""

    def __init__(self, stack: Stack, seed: int) -> None:
        self._stack, self.run = stack, ""
        self._rng = random.Random(f"hits/{seed}")
        self.attempts: set[str] = set()

    @property
    def kinds(self) -> dict[str, Callable[[], str]]:
        """By kind, what it does; each returns what it did, empty where there was nothing to hit. Left out: what this
        machine does not let us do."""
        kinds: dict[str, Callable[[], str]] = {part: self._killer(part) for part in PROCESSES}
        if self._stack.pid("docker") is None:
            del kinds["docker"]
        kinds |= {"container": self._container, "database locked": self._lock_database, "s3 503": self._refuse_s3}
        if os.path.ismount(self._stack.home / "s3"):
            kinds["disk full"] = self._fill_disk
        return kinds

    def _killer(self, part: str) -> Callable[[], str]:
        def kill() -> str:
            name = self._rng.choice(parts_of(self._stack, part))
            pid = self._stack.pid(name)
            if pid is None:
                return ""
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                return ""
            return f"kill -9 {pid}" if name == part else f"kill -9 {pid}, {name}"

        return kill

    def _container(self) -> str:
        """An agent's sandbox, taken away from outside."""
        agents = {
            labels.get(CONTAINER, name): labels["ratchet.attempt"]
            for name, labels in self._stack.sandboxes(self.run).items()
            if labels["ratchet.kind"] == "agent"
        }
        if not agents:
            return ""
        container, attempt = self._rng.choice(sorted(agents.items()))
        done = self._stack.run("docker", "kill", container, check=False)
        if done.returncode != 0:
            return ""
        self.attempts.add(attempt)
        return f"docker kill, of {attempt}"

    def _lock_database(self) -> str:
        connection = sqlite3.connect(self._stack.home / "ratchet.db", timeout=30, isolation_level=None)
        try:
            connection.execute("BEGIN EXCLUSIVE")
            time.sleep(HOLD_S)
            connection.execute("ROLLBACK")
        finally:
            connection.close()
        return f"exclusive lock for {HOLD_S:.0f} s"

    def _refuse_s3(self) -> str:
        """Another server takes the place of S3 and answers 503 to everything."""
        if not self._killer("s3")():
            return ""
        server = _take_port(self._stack.ports["s3"])
        if server is None:
            return ""
        threading.Thread(target=server.serve_forever, daemon=True).start()
        time.sleep(HOLD_S)
        server.shutdown()
        server.server_close()
        return f"503 for {HOLD_S:.0f} s, to {server.refused} requests"

    def _fill_disk(self) -> str:
        """Nothing can be written where S3 keeps its objects."""
        folder = self._stack.home / "s3"
        ballast = folder / "ballast"
        try:
            for _ in range(50):
                room = shutil.disk_usage(folder).free
                with suppress(OSError), ballast.open("wb") as file:
                    # S3 may write between the look and this.
                    os.posix_fallocate(file.fileno(), 0, max(room - 65536, 1))
                    break
            else:
                return ""
            time.sleep(HOLD_S)
        finally:
            ballast.unlink(missing_ok=True)
        return f"64 KiB of {room >> 20} MiB left for {HOLD_S:.0f} s"


class _Refusing(http.server.ThreadingHTTPServer):
    allow_reuse_address = True
    daemon_threads = True
    refused = 0


class _Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _refuse(self) -> None:
        assert isinstance(self.server, _Refusing)
        self.server.refused += 1
        self.send_response(503, "Slow Down")
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.end_headers()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _refuse

    def log_message(self, format: str, *args: object) -> None:
        pass


def _take_port(port: int) -> _Refusing | None:
    """The server on a port whose owner was killed just now; None when its next owner was quicker."""
    for _ in range(20):
        try:
            return _Refusing(("127.0.0.1", port), _Answer)
        except OSError:
            time.sleep(0.02)
    return None


def parts_of(stack: Stack, process: str) -> list[str]:
    """The supervisor's parts that a kind of process names: its own, or the engines."""
    names = [str(part["name"]) for part in stack.supervised()["parts"]]
    return [name for name in names if name.startswith("local-e")] if process == "engine" else [process]
