"""A world with real containers: the machine's daemon, or one of our own where none answers."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from activities.sandbox.channel import Operation, Result
from activities.sandbox.container import SandboxSpec
from activities.sandbox.docker import DockerBackend
from tests.sandbox.machines import Ground, machine_backend
from workers.stack.private_daemon import NoDaemon, some_daemon

SMALL = SandboxSpec(memory_mb=96, work_mb=16, data_mb=4, tmp_mb=4, processes=48)
_attempts = itertools.count()
_closing: set[asyncio.Task[None]] = set()


MACHINES = {
    *("test_drills", "test_grading", "test_machine_attempts", "test_machine_services", "test_task_images"),
    "test_tasks_check",
}
"""Files whose tests need a Debian, which takes minutes to make: `make machines` runs them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in MACHINES:
            item.add_marker(pytest.mark.machines)


@pytest.fixture(scope="session")
def docker_host() -> Iterator[str]:
    try:
        with some_daemon(os.environ.get("DOCKER_HOST", "")) as host:
            yield host
    except NoDaemon as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
async def backend(docker_host: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DockerBackend]:
    # Deeper than a socket's path may be long.
    state = tmp_path_factory.mktemp("state") / ("deep" * 20) / ("deeper" * 10)
    backend = DockerBackend(docker_host, state, slots=16)
    yield backend
    await backend.sweep("test")
    await backend.aclose()


@pytest.fixture(scope="session")
async def exec_backend(docker_host: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DockerBackend]:
    """The same over `docker exec`, as on a machine without gcc."""
    backend = DockerBackend(docker_host, tmp_path_factory.mktemp("exec"), slots=16, use_sbxd=False)
    yield backend
    await backend.sweep("test")
    await backend.aclose()


class Box:
    """One sandbox of a test: `await box(command)` runs it as the agent."""

    def __init__(self, backend: DockerBackend, sandbox_id: str, container_id: str, attempt: str) -> None:
        self.backend, self.id, self.container_id, self.attempt = backend, sandbox_id, container_id, attempt
        self._ops = itertools.count()

    async def __call__(
        self, command: str, *, timeout_s: float = 10, root: bool = False, cap_bytes: int = 65536, op_id: str = ""
    ) -> Result:
        name = op_id or f"op-{next(self._ops)}"
        return await self.backend.run(
            self.id, Operation(op_id=name, command=command, timeout_s=timeout_s, root=root, cap_bytes=cap_bytes)
        )

    async def out(self, command: str, *, root: bool = False) -> str:
        result = await self(command, root=root)
        return (result.head + result.tail).decode().strip()


def labels(attempt: str, *, run: str = "test", kind: str = "agent") -> dict[str, str]:
    return {"kind": kind, "run": run, "attempt": attempt}


def fresh_attempt() -> str:
    return f"test/g0/e0/a{next(_attempts)}"


MakeBox = Callable[[DockerBackend], Awaitable[Box]]


@asynccontextmanager
async def opened(backend: DockerBackend, spec: SandboxSpec = SMALL) -> AsyncIterator[Box]:
    attempt = fresh_attempt()
    sandbox = await backend.acquire(spec, labels(attempt))
    try:
        yield Box(backend, sandbox.id, sandbox.container_id, attempt)
    finally:
        # The next test needn't wait for it; the backend's own end does.
        task = asyncio.create_task(backend.close(sandbox.id))
        _closing.add(task)
        task.add_done_callback(_closing.discard)


@pytest.fixture
async def make_box() -> AsyncIterator[MakeBox]:
    async with AsyncExitStack() as stack:
        yield lambda backend: stack.enter_async_context(opened(backend))


@pytest.fixture(scope="module")
async def sbxd_box(backend: DockerBackend) -> AsyncIterator[Box]:
    """One sandbox for all commands that do it no harm."""
    async with opened(backend) as box:
        yield box


@pytest.fixture(scope="module")
async def exec_box(exec_backend: DockerBackend) -> AsyncIterator[Box]:
    async with opened(exec_backend) as box:
        yield box


@pytest.fixture(params=["sbxd", "exec"])
def shared_box(request: pytest.FixtureRequest, sbxd_box: Box, exec_box: Box) -> Box:
    return sbxd_box if request.param == "sbxd" else exec_box


@pytest.fixture
async def box(backend: DockerBackend, make_box: MakeBox) -> Box:
    """A sandbox with sbxd."""
    return await make_box(backend)


@pytest.fixture(params=["sbxd", "exec"])
async def any_box(
    request: pytest.FixtureRequest, backend: DockerBackend, exec_backend: DockerBackend, make_box: MakeBox
) -> Box:
    """The same test over both channels."""
    return await make_box(backend if request.param == "sbxd" else exec_backend)


def docker(host: str, *arguments: str) -> str:
    """The daemon's own command line: a second pair of eyes."""
    prefix = ["docker", "-H", host] if host else ["docker"]
    return subprocess.run([*prefix, *arguments], check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.fixture(scope="session")
async def ground(docker_host: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ground]:
    """Where tasks with machines of their own are played."""
    ground = Ground(machine_backend(docker_host, tmp_path_factory.mktemp("machines")))
    yield ground
    await ground.backend.sweep("machines")
    await ground.backend.aclose()
