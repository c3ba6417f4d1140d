"""A stack of a benchmark's own: its own folder and ports, real parts, workers whose environment it chooses.

`ratchet up` brings up everything but the workers that are measured; those are started here, so that one setting can
change between two measurements without a new engine. Called by collection.py and durability.py.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bench.measure import say
from workers.settings import Settings
from workers.stack.control import read_status
from workers.stack.state import Home

PROJECT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PORTS = ("temporal", "temporal-http", "temporal-metrics", "ui", "s3")
UP_S = 600
READY_S = 180.0
DRAIN_S = 30.0


class OwnStack:
    """A stack in `home`. Its commands and its workers see the ambient environment without settings of another stack,
    except where Docker is."""

    def __init__(self, home: Path, *, engines: int = 0, extra: Mapping[str, str] | None = None) -> None:
        self.home = home.resolve()
        self._engines = engines
        docker = os.environ.get("RATCHET_DOCKER_HOST") or os.environ.get("DOCKER_HOST", "")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RATCHET_", "TEMPORAL_"))}
        self.env = kept | {
            "RATCHET_HOME": str(self.home),
            "RATCHET_DOCKER_HOST": docker,
            "PATH": f"{BIN}:{kept.get('PATH', os.defpath)}",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(PROJECT), kept.get("PYTHONPATH", "")))),
            **(extra or {}),
        }

    def up(self, parts: tuple[str, ...]) -> None:
        """Start the parts and wait for them. Raises CalledProcessError with the command's words."""
        # With the engines last: engine i listens on the port of the first plus i.
        ports = free_ports(len(PORTS), max(1, self._engines))
        argv = ["ratchet", "up", "--engines", str(self._engines), "--parts", ",".join(parts)]
        argv += [word for name, port in zip(PORTS, ports, strict=False) for word in (f"--{name}-port", str(port))]
        argv += ["--engine-port", str(ports[-1])]
        self.run(*argv)

    def down(self) -> None:
        self.run("ratchet", "down", check=False)

    def run(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(argv, env=self.env, cwd=PROJECT, capture_output=True, text=True, timeout=UP_S)
        if check and done.returncode:
            raise SystemExit(f"{' '.join(argv)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def settings(self) -> Settings:
        """The settings that this stack's commands would see."""
        with _environment(self.env):
            return Settings()

    def pid(self, part: str) -> int:
        status = read_status(Home(self.home))
        found = next((item.pid for item in status.parts if item.name == part), None) if status else None
        if found is None:
            raise SystemExit(f"the bench's stack has no process {part}")
        return found

    @contextmanager
    def worker(self, role: str, extra: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
        """A worker of `role`, serving, for the time of the block."""
        beat = self.home / "health" / role
        beat.unlink(missing_ok=True)
        log = self.home / "logs" / f"bench-{role}.log"
        threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "workers.roles", role],
                env={**self.env, **threads, **(extra or {})},
                cwd=self.home,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            until(f"the worker {role} (log: {log})", lambda: beat.exists() or process.poll() is not None)
            if process.poll() is not None:
                raise SystemExit(f"the worker {role} ended with {process.returncode}: {log}")
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(DRAIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def own_stack(
    home: Path | None, parts: tuple[str, ...], *, engines: int = 0, extra: Mapping[str, str] | None = None
) -> Iterator[OwnStack]:
    """A stack that is up for the time of the block. `home` None: a folder that goes afterwards."""
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as scratch:
        made = OwnStack(home or Path(scratch) / "home", engines=engines, extra=extra)
        made.home.mkdir(parents=True, exist_ok=True)
        say(f"a stack of the bench's own comes up in {made.home}")
        # Ended from outside, it still takes its stack down.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
        try:
            made.up(parts)
            yield made
        finally:
            made.down()


def until(what: str, condition: Callable[[], bool], seconds: float = READY_S) -> None:
    """Wait for the condition. Raises SystemExit where it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.05)


def free_ports(count: int, run: int) -> list[int]:
    """`count` free ports, and the first of `run` free ones in a row."""
    singles = [_bound(0) for _ in range(count)]
    for _ in range(100):
        first = _bound(0)
        row = [first]
        base = first.getsockname()[1]
        try:
            for offset in range(1, run):
                row.append(_bound(base + offset))
        except OSError:
            continue
        finally:
            for opened in row:
                opened.close()
        ports = [opened.getsockname()[1] for opened in singles]
        for opened in singles:
            opened.close()
        return [*ports, base]
    raise SystemExit("no free ports in a row")


def _bound(port: int) -> socket.socket:
    opened = socket.socket()
    try:
        opened.bind(("127.0.0.1", port))
    except OSError:
        opened.close()
        raise
    return opened


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
