"""Tasks are set up once and forked: a fork is what a setup gives, and where it could not be, every sandbox sets up."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import pytest

from activities.sandbox.channel import Operation, Result
from activities.sandbox.containers import Sandbox
from activities.sandbox.docker import DockerBackend
from activities.sandbox.preparation import ARCHIVE, Preparation, key_of
from activities.sandbox.snapshots import Snapshots
from activities.sandbox.verification import judge, set_up
from tasksets import open_taskset
from tasksets.base import Task
from tasksets.shell import KINDS
from tests.sandbox.conftest import SMALL, fresh_attempt, labels
from workflows.errors import SandboxError

pytestmark = pytest.mark.docker

EVERYTHING = "cd / && find work data tmp -exec stat -c '%A %u %g %h %F %N' {} + | sort"
TIMES = "cd / && find work data tmp -exec stat -c '%n %Y %y' {} + | sort"
CONTENT = "cd / && find work data tmp -type f -exec sha256sum {} + | sort"
SIZES = "cd / && find work data tmp ! -type d -exec stat -c '%n %s' {} + | sort"
RANDOM = "cat /proc/sys/kernel/random/uuid > /data/id"
_names = itertools.count()


@pytest.fixture(scope="module")
async def backend(docker_host: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DockerBackend]:
    """Of its own, so that nobody else's snapshots are there."""
    backend = DockerBackend(docker_host, tmp_path_factory.mktemp("state"), slots=16)
    yield backend
    await backend.sweep("test")
    await backend.aclose()


@pytest.fixture
async def fresh(backend: DockerBackend) -> AsyncIterator[Callable[[], Awaitable[Sandbox]]]:
    made: list[str] = []

    async def another() -> Sandbox:
        sandbox = await backend.acquire(SMALL, labels(fresh_attempt()))
        made.append(sandbox.id)
        return sandbox

    yield another
    for sandbox_id in made:
        backend.forget(sandbox_id)


Fresh = Callable[[], Awaitable[Sandbox]]


def task_of(setup: str, **changes: object) -> Task:
    """A task with an environment of its own."""
    name = f"t{next(_names)}"
    given = {"id": name, "kind": "k", "instruction": "", "setup": f"# {name}\n{setup}", "check": "exit 0"}
    return Task.model_validate(given | changes)


def snapshots(backend: DockerBackend) -> Snapshots:
    return Snapshots(backend.state / "snapshots")


async def look(backend: DockerBackend, sandbox: Sandbox, command: str) -> str:
    op = Operation(op_id=f"look-{next(_names)}", command=command, timeout_s=20, root=True)
    result = await backend.run(sandbox.id, op)
    assert result.exit_code == 0, result
    return (result.head + result.tail).decode()


async def verdict(backend: DockerBackend, task: Task, sandbox: Sandbox, commands: list[str], answer: str) -> bool:
    for turn, command in enumerate(commands):
        await backend.run(sandbox.id, Operation(op_id=f"act-{turn}", command=command, timeout_s=10))
    run = partial(backend.run, sandbox.id)
    return (await judge(task, answer, run, lambda: pytest.fail("the check broke"))).passed


@pytest.mark.parametrize("kind", KINDS)
async def test_for_every_kind_of_task_a_fork_is_a_prepared_sandbox_and_gets_its_verdict(
    backend: DockerBackend, fresh: Fresh, kind: str
) -> None:
    task, preparation = open_taskset("shell").load(f"{kind}-0003"), Preparation(backend)
    first, fork, without, plain = [await fresh() for _ in range(4)]
    assert not await preparation.prepare(task, first)
    assert await preparation.prepare(task, fork) and await preparation.prepare(task, without)
    await set_up(task, partial(backend.run, plain.id))
    for view in (EVERYTHING, CONTENT, SIZES):
        assert await look(backend, fork, view) == await look(backend, plain, view)
    assert await look(backend, fork, TIMES) == await look(backend, first, TIMES)
    for sandbox in (first, fork, plain):
        assert await verdict(backend, task, sandbox, task.oracle, task.oracle_answer)
    assert not await verdict(backend, task, without, [], "")


async def test_a_fork_keeps_links_modes_owners_times_pipes_and_odd_names(backend: DockerBackend, fresh: Fresh) -> None:
    task = task_of(
        """
        cd /work && mkdir -p a/b && echo one > a/one && ln a/one a/b/same && ln -s ../one a/b/link && ln -s nowhere gone
        mkfifo pipe && echo x > 'a name
        of two lines' && : > empty && chmod 4751 a/one && chmod 1777 a && chown 1000:7 a/b && chown -h 5:6 gone
        head -c 300000 /dev/urandom > big && touch -d '2001-02-03 04:05:06' big && chmod 700 /data && chmod 0 empty
        sleep 0.01; echo late > /tmp/late; touch -d '1999-01-01 00:00:00' a/b
        """
    )
    preparation, first, fork = Preparation(backend), await fresh(), await fresh()
    assert not await preparation.prepare(task, first)
    assert await preparation.prepare(task, fork)
    for view in (EVERYTHING, TIMES, CONTENT, SIZES):
        assert await look(backend, fork, view) == await look(backend, first, view)
    inodes = await look(backend, fork, "stat -c %i /work/a/one /work/a/b/same")
    assert len(set(inodes.split())) == 1
    assert ".000000000" not in await look(backend, fork, "stat -c %y /work/a/one")


async def test_siblings_that_come_together_wait_for_one_preparation(backend: DockerBackend, fresh: Fresh) -> None:
    task, preparation = task_of(f"{RANDOM}; sleep 0.5"), Preparation(backend)
    siblings = [await fresh() for _ in range(4)]
    forked = await asyncio.gather(*(preparation.prepare(task, sibling) for sibling in siblings))
    assert sorted(forked) == [False, True, True, True]
    assert len({await look(backend, sibling, "cat /data/id") for sibling in siblings}) == 1


async def test_two_processes_prepare_once(backend: DockerBackend, fresh: Fresh) -> None:
    task = task_of(f"{RANDOM}; sleep 0.5")
    siblings = [await fresh() for _ in range(2)]
    forked = await asyncio.gather(*(Preparation(backend).prepare(task, sibling) for sibling in siblings))
    assert sorted(forked) == [False, True]


@pytest.mark.parametrize(
    ("leaves", "why"),
    [
        ("sleep 30 > /dev/null 2>&1 &", "1 processes are left running"),
        ("truncate -s 1000000 /work/holes", "has holes"),
        ("echo x > /dev/noted", "/dev/noted is outside the folders"),
    ],
)
async def test_what_a_snapshot_cannot_hold_is_set_up_in_each_sandbox(
    backend: DockerBackend, fresh: Fresh, leaves: str, why: str
) -> None:
    task, preparation = task_of(f"{RANDOM}\n{leaves}\ntrue"), Preparation(backend)
    siblings = [await fresh() for _ in range(3)]
    forked = await asyncio.gather(*(preparation.prepare(task, sibling) for sibling in siblings))
    assert forked == [False] * 3
    assert why in snapshots(backend).refused(key_of(task, siblings[0]))
    assert len({await look(backend, sibling, "cat /data/id") for sibling in siblings}) == 3


async def test_a_setup_that_is_too_large_is_not_kept(
    backend: DockerBackend, fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.sandbox.preparation.MOST_BYTES", 10_000)
    task, preparation, sandbox = task_of("head -c 20000 /dev/urandom > /work/big"), Preparation(backend), await fresh()
    assert not await preparation.prepare(task, sandbox)
    assert "more than 10000 bytes" in snapshots(backend).refused(key_of(task, sandbox))
    assert not (backend.boxes.box(sandbox.id) / ARCHIVE).exists()


async def test_a_setup_that_fails_fails_for_each_sibling_and_is_not_kept(backend: DockerBackend, fresh: Fresh) -> None:
    task, preparation = task_of("sleep 0.3; echo no such luck; exit 3"), Preparation(backend)
    siblings = [await fresh() for _ in range(3)]
    ends = await asyncio.gather(*(preparation.prepare(task, sibling) for sibling in siblings), return_exceptions=True)
    assert all(isinstance(end, SandboxError) and not end.retryable for end in ends)
    assert all("failed: exit 3: no such luck" in str(end) for end in ends)
    assert not snapshots(backend).has(key_of(task, siblings[0]))


async def test_another_environment_is_another_snapshot(backend: DockerBackend, fresh: Fresh) -> None:
    sandbox = await fresh()
    task = task_of("true")
    assert key_of(task, sandbox) == key_of(task.model_copy(update={"id": "x", "check": "exit 1"}), sandbox)
    assert key_of(task, sandbox) != key_of(task.model_copy(update={"setup": "false"}), sandbox)


async def test_a_snapshot_that_was_cut_short_is_dropped_and_the_retry_sets_up(
    backend: DockerBackend, fresh: Fresh
) -> None:
    task, preparation = task_of("echo x > /work/file"), Preparation(backend)
    first = await fresh()
    await preparation.prepare(task, first)
    path = snapshots(backend).path(key_of(task, first))
    path.write_bytes(path.read_bytes()[:-9])
    attempt = fresh_attempt()
    broken = await backend.acquire(SMALL, labels(attempt))
    with pytest.raises(SandboxError, match="the archive was cut short") as error:
        await preparation.prepare(task, broken)
    assert error.value.retryable and await backend._names({"ratchet.attempt": attempt}) == set()
    again = await backend.acquire(SMALL, labels(attempt))
    assert not await preparation.prepare(task, again)
    assert await look(backend, again, "cat /work/file") == "x\n"
    await backend.close_attempt(attempt)


@pytest.mark.parametrize("fork", [False, True])
async def test_a_retried_preparation_does_nothing_twice(backend: DockerBackend, fork: bool) -> None:
    task, attempt = task_of("echo line >> /work/log"), fresh_attempt()
    if fork:
        await prepared_elsewhere(backend, task)
    for _ in range(3):
        sandbox = await backend.acquire(SMALL, labels(attempt))
        assert await Preparation(backend).prepare(task, sandbox) is fork
    assert await look(backend, sandbox, "cat /work/log") == "line\n"
    await backend.close_attempt(attempt)


async def test_a_try_that_was_overtaken_keeps_nothing_of_the_agents(backend: DockerBackend) -> None:
    """It has set up; before it keeps that, another try has finished and the agent acts."""
    task, attempt = task_of("echo clean > /work/file"), fresh_attempt()
    preparation = Preparation(backend)
    overtaken = await backend.acquire(SMALL, labels(attempt))
    run, go, waits = partial(backend.run, overtaken.id), asyncio.Event(), asyncio.Event()

    async def slow(op: Operation) -> Result:
        if op.op_id == "keep":
            waits.set()
            await go.wait()
        return await run(op)

    old = asyncio.create_task(preparation._prepare_first(key_of(task, overtaken), task, overtaken, slow))
    await asyncio.wait_for(waits.wait(), 60)
    found = await backend.acquire(SMALL, labels(attempt))
    assert found.found and not await Preparation(backend).prepare(task, found)
    await look(backend, found, "echo dirt > /work/file")
    go.set()
    await old
    assert not snapshots(backend).has(key_of(task, found))
    await backend.close_attempt(attempt)


async def test_the_agent_finds_no_archive(backend: DockerBackend, fresh: Fresh) -> None:
    task = task_of("echo x > /work/file")
    await prepared_elsewhere(backend, task)
    sandbox = await fresh()
    assert await Preparation(backend).prepare(task, sandbox)
    assert not (backend.boxes.box(sandbox.id) / ARCHIVE).exists()


async def prepared_elsewhere(backend: DockerBackend, task: Task) -> None:
    sandbox = await backend.acquire(SMALL, labels(fresh_attempt()))
    assert not await Preparation(backend).prepare(task, sandbox)
    await backend.close(sandbox.id)
