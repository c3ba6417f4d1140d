"""The daemon that tests and benchmarks kill: nothing of it is left when it is stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from activities.sandbox.docker import DockerBackend
from tests.sandbox.conftest import SMALL, fresh_attempt, labels
from workers.stack.private_daemon import PrivateDaemon, may_start_one

pytestmark = pytest.mark.docker


async def test_its_containers_end_with_it_though_nobody_removed_them(tmp_path: Path) -> None:
    if not may_start_one():
        pytest.skip("a daemon of one's own needs root, dockerd and containerd")
    daemon = PrivateDaemon()
    daemon.start()
    backend = DockerBackend(daemon.host, tmp_path, 2)
    try:
        sandbox = await backend.acquire(SMALL, labels(fresh_attempt()))
        inside = Path(f"/proc/{await backend.pid(sandbox.id)}")
        assert inside.exists()
        daemon.kill()
        daemon.stop()
        assert not inside.exists()
        assert processes_with(daemon.host.removeprefix("unix://").removesuffix("docker.sock")) == []
    finally:
        await backend.aclose()


def processes_with(word: str) -> list[str]:
    """Command lines of the processes that name it."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = process.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line:
            found.append(line)
    return found
