"""A Docker daemon of one's own, in its own network name space: it can be killed without hurting anybody.

Owns its processes, its containers, its folder and its mounts, all of which `stop` takes away. For tests and benchmarks.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DEFAULT_SOCKET = Path("/var/run/docker.sock")


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        try:
            client.connect(str(path))
            client.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return b"200" in client.recv(64)
        except OSError:
            return False


def may_start_one() -> bool:
    return os.geteuid() == 0 and all(shutil.which(name) for name in ("dockerd", "containerd", "unshare"))


class NoDaemon(Exception):
    """There is none to be had, in words for a person."""


@contextmanager
def some_daemon(asked: str) -> Iterator[str]:
    """The address of a daemon: `asked` where it is not empty, the machine's where that answers, or one of our own for
    as long as the block lasts. Raises NoDaemon."""
    if asked or answers(DEFAULT_SOCKET):
        yield asked
    elif may_start_one():
        daemon = PrivateDaemon()
        daemon.start()
        try:
            yield daemon.host
        finally:
            daemon.stop()
    else:
        raise NoDaemon("no Docker daemon answers and this user can't start one")


USER = "dockremap"
FIRST_ID = 231072
"""Of the users and groups that a daemon with user namespaces maps its containers' to."""
NEEDS_USER = ("passwd", f"{USER}:x:60999:60999::/:/bin/false"), ("group", f"{USER}:x:60999:")
NEEDS_IDS = ("subuid", f"{USER}:{FIRST_ID}:65536"), ("subgid", f"{USER}:{FIRST_ID}:65536")
COVERED = (
    'for name in passwd group subuid subgid; do mount --bind "$1/$name" "/etc/$name" || exit 1; done; shift; exec "$@"'
)


class PrivateDaemon:
    """`start` it, `kill` it as a crash would, `start` it again; `stop` for good. `userns`: root of its containers is
    nobody on this machine, of which only the daemon's own mount name space is told the user. `in_network`: it is in the
    machine's network, so that containers which are, too, are reached from here; it changes nothing there."""

    def __init__(self, *, userns: bool = False, in_network: bool = False) -> None:
        self._userns = userns
        self._in_network = in_network
        # Not below pytest's folders: a socket's path may have 108 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="ratchet-dockerd-"))
        self._socket = self._folder / "docker.sock"
        self.host = f"unix://{self._socket}"
        self._containerd: subprocess.Popen[bytes] | None = None
        self._dockerd: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        log = (self._folder / "log").open("ab")
        containerd_socket = self._folder / "containerd.sock"
        if self._containerd is None:
            containerd = [
                "--root",
                f"{self._folder}/c",
                "--state",
                f"{self._folder}/s",
                "--address",
                str(containerd_socket),
            ]
            prefix = self._covered() if self._userns else []
            self._containerd = subprocess.Popen([*prefix, "containerd", *containerd], stdout=log, stderr=log)
            _wait_for(containerd_socket.exists, self._containerd, self._folder / "log", "containerd")
        options = {
            "--host": self.host,
            "--containerd": containerd_socket,
            "--data-root": self._folder / "data",
            "--exec-root": self._folder / "exec",
            "--pidfile": self._folder / "pid",
        }
        command = ["dockerd", "--bridge=none"] if self._in_network else ["unshare", "--net", "dockerd"]
        command += ["--live-restore", "--iptables=false"]
        if self._userns:
            command = ["nsenter", f"--mount=/proc/{self._containerd.pid}/ns/mnt", *command, f"--userns-remap={USER}"]
        command += [f"{name}={value}" for name, value in options.items()]
        self._dockerd = subprocess.Popen(command, stdout=log, stderr=log)
        _wait_for(lambda: answers(self._socket), self._dockerd, self._folder / "log", "dockerd")

    def _covered(self) -> list[str]:
        """What starts a program in a mount name space in which this machine has the user of the containers."""
        # Root of a container has to get through to its files.
        self._folder.chmod(0o711)
        etc = self._folder / "etc"
        etc.mkdir(exist_ok=True)
        for name, line in (*NEEDS_USER, *NEEDS_IDS):
            there = Path("/etc") / name
            there.touch()
            (etc / name).write_text(f"{there.read_text().rstrip()}\n{line}\n")
        return ["unshare", "--mount", "sh", "-c", COVERED, "sh", str(etc)]

    def kill(self) -> None:
        """As a crash: no clean-up."""
        assert self._dockerd is not None
        self._dockerd.kill()
        self._dockerd.wait()

    def stop(self) -> None:
        for process in (self._dockerd, self._containerd):
            if process is not None:
                process.terminate()
                process.wait(30)
        # Containers outlive their daemon.
        shims = _shims(self._folder / "containerd.sock")
        left = [pid for shim in shims for pid in (*_children(shim), shim)]
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in left) and time.monotonic() < until:
            time.sleep(0.05)
        for mount in sorted(_mounts_below(self._folder), key=len, reverse=True):
            subprocess.run(["umount", mount], check=False)
        shutil.rmtree(self._folder, ignore_errors=True)


def _wait_for(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, name: str) -> None:
    until = time.monotonic() + 30
    while not ready():
        if time.monotonic() > until or process.poll() is not None:
            raise RuntimeError(f"{name} does not come up: {log.read_text()[-2000:]}")
        time.sleep(0.1)


def _shims(containerd: Path) -> list[int]:
    """The processes that hold the containers of the daemon at this socket."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        # One that has ended meanwhile has no command line.
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if b"containerd-shim" in words[0] and str(containerd).encode() in words:
                found.append(int(process.name))
    return found


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(word) for file in Path(f"/proc/{pid}/task").glob("*/children") for word in file.read_text().split()]
    return []


def _mounts_below(folder: Path) -> list[str]:
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return [point for point in points if point.startswith(f"{folder}/")]
