"""Sandboxes that were started before anyone asked: taken at once, found like any other, and none is left."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from activities.janitor.host import HostJanitorActivities
from activities.sandbox import pool as pool_module
from activities.sandbox.channel import Operation
from activities.sandbox.docker import DockerBackend
from tests.sandbox.conftest import SMALL, docker, fresh_attempt, labels
from workflows.contracts import JanitorInput
from workflows.errors import SandboxError

pytestmark = pytest.mark.docker

Make = Callable[..., DockerBackend]


async def eventually(condition: Callable[[], Awaitable[bool]] | Callable[[], bool], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while True:
        found = condition()
        if await found if isinstance(found, Awaitable) else found:
            return
        assert time.monotonic() < until, "not in time"
        await asyncio.sleep(0.02)


@pytest.fixture
async def make(docker_host: str, tmp_path: Path) -> AsyncIterator[Make]:
    """Backends of one state folder, as in several processes."""
    made: list[DockerBackend] = []

    def another(*, slots: int = 8, pool: int = 2, **options: Any) -> DockerBackend:
        made.append(DockerBackend(docker_host, tmp_path / "state", slots, pool=pool, **options))
        return made[-1]

    yield another
    for backend in made:
        await backend.aclose()
    rest = DockerBackend(docker_host, tmp_path / "state", 8)
    await asyncio.gather(*(rest.close(item.id) for item in await rest.owned()))
    left = await rest.owned()
    await rest.aclose()
    assert left == []


async def full(backend: DockerBackend, members: int = 2) -> DockerBackend:
    await backend.keep_warm(SMALL)
    await eventually(lambda: sum(backend.waiting().values()) == members)
    return backend


async def frozen(backend: DockerBackend, members: int = 2) -> DockerBackend:
    """`members` wait, and whoever started them does nothing any more."""
    await full(backend, members)
    pool = backend._pool
    assert pool is not None and pool._keeper is not None
    pool._keeper.cancel()
    await asyncio.gather(pool._keeper, *pool._starting, return_exceptions=True)
    pool._keeper = None
    return backend


async def said(backend: DockerBackend, sandbox_id: str, command: str) -> bytes:
    return (await backend.run(sandbox_id, Operation(op_id=command[:40], command=command, timeout_s=10))).head


async def test_a_take_starts_nothing_and_does_not_ask_the_daemon(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = await frozen(make())
    await backend.acquire(SMALL, labels(fresh_attempt()))  # the slots are counted

    async def call(verb: str, *_: object, **__: object) -> None:
        raise AssertionError(f"docker {verb} on the way of an episode")

    monkeypatch.setattr(backend.daemon, "call", call)
    sandbox = await backend.acquire(SMALL, labels(fresh_attempt()))
    assert sandbox.warm and not sandbox.found
    assert (
        await said(backend, sandbox.id, "hostname; ls -A /work /data /tmp") == b"sandbox\n/data:\n\n/tmp:\n\n/work:\n"
    )


async def test_a_retried_acquire_finds_the_one_of_its_first_try_also_in_another_process(make: Make) -> None:
    backend, attempt = await frozen(make()), fresh_attempt()
    first = await backend.acquire(SMALL, labels(attempt))
    await said(backend, first.id, "echo kept > note")
    for again in (backend, make(pool=0), make()):
        sandbox = await again.acquire(SMALL, labels(attempt))
        assert (sandbox.id, sandbox.container_id, sandbox.warm) == (first.id, first.container_id, True)
        assert sandbox.found and await said(again, sandbox.id, "cat note") == b"kept\n"


async def test_two_processes_share_a_pool_and_no_sandbox_is_given_twice(make: Make) -> None:
    one, other = await frozen(make(pool=4), 4), make(pool=4)
    made = await asyncio.gather(*((one, other)[n % 2].acquire(SMALL, labels(fresh_attempt())) for n in range(4)))
    assert len({sandbox.container_id for sandbox in made}) == 4
    assert all(sandbox.warm for sandbox in made)


async def test_what_a_dead_worker_left_is_used_by_the_next(make: Make) -> None:
    await frozen(make())
    heir = await full(make())
    assert (await heir.acquire(SMALL, labels(fresh_attempt()))).warm
    assert len(await heir._names({"ratchet.kind": "pool"})) <= 2


async def test_what_a_dead_worker_left_goes_with_the_one_that_came_after_it(make: Make) -> None:
    dead = await frozen(make())
    assert dead._pool is not None
    dead._pool._members.disown()
    heir = await full(make())
    await heir.aclose()
    assert await make(pool=0).owned() == []


async def test_what_a_dead_worker_left_and_nobody_asks_for_makes_room(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other limits: it would hold the bound until it is too old to be taken."""
    dead = await frozen(make())
    assert dead._pool is not None
    dead._pool._members.disown()
    monkeypatch.setattr(pool_module, "UNASKED_S", 0.0)
    (old,) = dead.waiting()
    heir = make()
    await heir.keep_warm(dataclasses.replace(SMALL, memory_mb=SMALL.memory_mb + 16))
    await eventually(lambda: sum(count for key, count in heir.waiting().items() if key != old) == 2)
    assert not heir.waiting().get(old)


async def test_a_worker_that_ends_takes_its_pool_with_it_and_leaves_the_agents(make: Make) -> None:
    backend = await full(make())
    kept = await backend.acquire(SMALL, labels(fresh_attempt()))
    await backend.aclose()
    after = make(pool=0)
    assert [item.id for item in await after.owned()] == [kept.id]
    assert await said(after, kept.id, "echo fine") == b"fine\n"


async def test_a_dead_one_is_not_handed_out(make: Make) -> None:
    backend = await frozen(make())
    for name in await backend._names({"ratchet.kind": "pool"}):
        docker(backend.daemon.docker_host, "kill", name)
    sandbox = await backend.acquire(SMALL, labels(fresh_attempt()))
    assert not sandbox.warm and await said(backend, sandbox.id, "echo fine") == b"fine\n"
    assert await backend._names({"ratchet.kind": "pool"}) == set()


async def test_one_that_dies_after_it_was_taken_makes_room_like_any_other(make: Make) -> None:
    backend, attempt = await frozen(make()), fresh_attempt()
    lost = await backend.acquire(SMALL, labels(attempt))
    docker(backend.daemon.docker_host, "kill", lost.container_id)
    fresh = await backend.acquire(SMALL, labels(attempt))
    assert fresh.id == lost.id and fresh.container_id != lost.container_id
    assert await backend._names({"ratchet.attempt": attempt}) == {fresh.id}
    assert docker(backend.daemon.docker_host, "ps", "-aq", "--no-trunc", "--filter", f"id={lost.container_id}") == ""


async def test_one_that_was_taken_is_found_by_attempt_by_run_and_by_the_janitor(make: Make, tmp_path: Path) -> None:
    backend = await frozen(make(), 2)
    first = await backend.acquire(SMALL, labels("r/g0/e0/a0", run="r"))
    second = await backend.acquire(SMALL, labels("r/g0/e1/a0", run="r"))
    assert first.warm and second.warm
    assert await backend._names({"ratchet.attempt": "r/g0/e0/a0"}) == {first.id}
    assert await backend._living() == {first.id, second.id}
    janitor = janitor_of(backend, {"r/g0/e0/a0": "terminated"}, tmp_path)
    assert (await janitor.sweep_host(AT_ONCE)).removed == {"containers/terminated": 1}
    assert await backend.sweep("r") == (1, 1)
    assert await backend.owned() == []


async def test_the_janitor_leaves_one_that_is_taken_while_it_looks(make: Make, tmp_path: Path) -> None:
    backend = await frozen(make(), 2)
    listed, owned = await backend.owned(), backend.owned
    taken = await backend.acquire(SMALL, labels("r/g0/e0/a0"))

    async def before() -> Any:
        return listed

    backend.owned = before  # type: ignore[method-assign]
    report = await janitor_of(backend, {}, tmp_path).sweep_host(AT_ONCE)
    backend.owned = owned  # type: ignore[method-assign]
    assert not report.errors
    assert [item.id for item in await backend.owned()] == [taken.id]
    assert await said(backend, taken.id, "echo fine") == b"fine\n"


async def test_a_close_of_the_attempt_leaves_nothing_of_one_that_was_taken(make: Make) -> None:
    backend, attempt = await frozen(make()), fresh_attempt()
    await backend.acquire(SMALL, labels(attempt))
    await backend.acquire(SMALL, labels(attempt, kind="verifier"))
    await backend.close_attempt(attempt)
    assert await backend.owned() == []


async def test_verifiers_are_served_and_a_canary_starts_afresh(make: Make) -> None:
    backend, attempt = await frozen(make()), fresh_attempt()
    assert (await backend.acquire(SMALL, labels(attempt, kind="verifier"))).warm
    assert not (await backend.acquire(SMALL, labels(attempt, kind="canary"))).warm


async def test_the_pool_stands_beside_the_slots_and_what_is_taken_counts_in_them(make: Make) -> None:
    backend = await full(make(slots=1))
    first = await backend.acquire(SMALL, labels(fresh_attempt()))
    second = asyncio.create_task(backend.acquire(SMALL, labels(fresh_attempt())))
    await eventually(lambda: sum(backend.waiting().values()) == 2)
    assert first.warm and not second.done()
    await backend.close(first.id)
    assert (await second).warm


async def test_other_limits_are_another_pool(make: Make) -> None:
    backend = await frozen(make())
    other = SMALL.__class__(**{**SMALL.__dict__, "memory_mb": SMALL.memory_mb + 16})
    assert not (await backend.acquire(other, labels(fresh_attempt()))).warm


async def test_the_pool_starts_none_while_somebody_waits_for_one(make: Make) -> None:
    backend = make()
    async with backend._containers.awaited():
        await backend.keep_warm(SMALL)
        pool = backend._pool
        assert pool is not None
        await eventually(lambda: len(pool._starting) == 2)
        assert await backend._names({"ratchet.kind": "pool"}) == set()
    await eventually(lambda: sum(backend.waiting().values()) == 2)


async def test_a_pool_whose_daemon_is_not_there_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = DockerBackend(f"unix://{tmp_path}/none.sock", tmp_path, 1, pool=2)
    await backend.keep_warm(SMALL)
    pool = backend._pool
    assert pool is not None and pool._keeper is not None
    with pytest.raises(SandboxError, match="no answer"):
        await backend.acquire(SMALL, labels(fresh_attempt()))
    assert not pool._keeper.done()
    await backend.aclose()


# --- releases -------------------------------------------------------------------------------------------------------


async def test_a_release_comes_back_before_the_container_is_gone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, attempt, go = make(pool=0), fresh_attempt(), asyncio.Event()
    sandbox = await backend.acquire(SMALL, labels(attempt))
    remove = backend._containers.remove

    async def slow(name: str) -> None:
        await go.wait()
        await remove(name)

    monkeypatch.setattr(backend._containers, "remove", slow)
    await backend.release_attempt(attempt)
    assert await backend._names({"ratchet.attempt": attempt}) == {sandbox.id}
    go.set()
    await backend.settled()
    assert await backend.owned() == []


async def test_a_release_whose_worker_dies_is_finished_by_the_next(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, attempt = make(pool=0), fresh_attempt()
    await backend.acquire(SMALL, labels(attempt))
    with monkeypatch.context() as patched:
        patched.setattr(backend._removals, "insist", lambda what, work: None)
        await backend.release_attempt(attempt)
    assert len(await backend.owned()) == 1
    heir = make(pool=0)
    await heir.keep_warm(SMALL)
    await heir.settled()
    assert await heir.owned() == []


async def test_a_release_that_the_daemon_refuses_is_tried_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("activities.sandbox.removals.PAUSES_S", (0.01, 0.01, 0.01))
    backend, attempt, tries = make(pool=0), fresh_attempt(), 0
    await backend.acquire(SMALL, labels(attempt))
    remove = backend._containers.remove

    async def away(name: str) -> None:
        nonlocal tries
        tries += 1
        if tries <= 2:
            raise SandboxError("docker remove: no answer")
        await remove(name)

    monkeypatch.setattr(backend._containers, "remove", away)
    await backend.release_attempt(attempt)
    await backend.settled()
    assert await backend.owned() == []


AT_ONCE = JanitorInput(sandbox_grace_s=0, unowned_grace_s=0)


def janitor_of(backend: DockerBackend, endings: dict[str, str], home: Path) -> HostJanitorActivities:
    async def ending(attempt: str) -> str:
        return endings.get(attempt, "")

    async def here() -> str:
        return "default/1"

    return HostJanitorActivities(backend, ending, home, namespace=here)
