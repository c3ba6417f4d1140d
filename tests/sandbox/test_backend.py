"""Sandboxes come, are found again and go; none is left."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from activities.sandbox.channel import Operation
from activities.sandbox.daemon import Daemon, Refused
from activities.sandbox.docker import DockerBackend
from activities.sandbox.evidence import SandboxGone
from activities.sandbox.image import busybox_layer, ensure_image
from activities.sandbox.toolbox import build_toolbox
from tests.sandbox.conftest import SMALL, Box, docker, fresh_attempt, labels
from workflows.errors import InvalidConfig, SandboxError

pytestmark = pytest.mark.docker


def containers(host: str, run: str) -> list[str]:
    return docker(host, "ps", "-aq", "--filter", f"label=ratchet.run={run}").split()


async def test_a_retried_acquire_returns_the_container_of_its_first_try(backend: DockerBackend, box: Box) -> None:
    again = await backend.acquire(SMALL, labels(box.attempt))
    assert (again.id, again.container_id) == (box.id, box.container_id)


async def test_acquires_of_one_attempt_at_the_same_time_make_one_container(backend: DockerBackend) -> None:
    attempt = fresh_attempt()
    made = await asyncio.gather(*(backend.acquire(SMALL, labels(attempt, run="same")) for _ in range(4)))
    assert len({sandbox.container_id for sandbox in made}) == 1
    assert await backend.sweep("same") == (1, 1)


async def test_another_process_finds_the_sandbox_of_a_dead_one(
    docker_host: str, backend: DockerBackend, box: Box
) -> None:
    await box("echo kept > note")
    heir = DockerBackend(docker_host, backend.state, slots=16)
    try:
        assert (await heir.acquire(SMALL, labels(box.attempt))).container_id == box.container_id
        result = await heir.run(box.id, Operation(op_id="t1", command="cat note", timeout_s=5))
        assert result.head == b"kept\n"
    finally:
        await heir.aclose()


async def test_a_release_after_a_cancelled_acquire_leaves_nothing(backend: DockerBackend, docker_host: str) -> None:
    attempt = fresh_attempt()
    call = asyncio.create_task(backend.acquire(SMALL, labels(attempt, run="cancelled")))
    await asyncio.sleep(0.05)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await backend.close_attempt(attempt)
    assert containers(docker_host, "cancelled") == []


async def test_a_dead_container_makes_room_for_a_fresh_one(backend: DockerBackend, box: Box) -> None:
    await box("echo old", op_id="t0")
    docker(backend._daemon.docker_host, "kill", box.id)
    fresh = await backend.acquire(SMALL, labels(box.attempt))
    assert fresh.container_id != box.container_id
    result = await backend.run(box.id, Operation(op_id="t0", command="echo new", timeout_s=5))
    assert (result.replayed, result.head) == (False, b"new\n")


async def test_a_container_that_a_dying_daemon_left_half_started_makes_room_too(
    backend: DockerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers every further start with an error, for good."""
    attempt, call = fresh_attempt(), backend.daemon.call

    async def refused(verb: str, action: Callable[[Any], Awaitable[Any]], **options: Any) -> Any:
        if verb == "start":
            raise Refused('docker start: task "2a1c" already exists (500)', 500)
        return await call(verb, action, **options)

    with monkeypatch.context() as patched, pytest.raises(Refused) as error:
        patched.setattr(backend.daemon, "call", refused)
        await backend.acquire(SMALL, labels(attempt, run="half"))
    assert error.value.retryable
    assert containers(backend.daemon.docker_host, "half") == []
    await backend.acquire(SMALL, labels(attempt, run="half"))
    assert await backend.sweep("half") == (1, 1)


async def test_closing_twice_and_at_once_is_fine(backend: DockerBackend) -> None:
    sandbox = await backend.acquire(SMALL, labels(fresh_attempt(), run="closing"))
    await asyncio.gather(*(backend.close(sandbox.id) for _ in range(3)))
    await backend.close(sandbox.id)
    assert not backend._boxes.box(sandbox.id).exists()
    with pytest.raises(SandboxGone):
        await backend.run(sandbox.id, Operation(op_id="t0", command="true", timeout_s=1))


async def test_a_cancelled_close_goes_on(backend: DockerBackend, docker_host: str) -> None:
    sandbox = await backend.acquire(SMALL, labels(fresh_attempt(), run="shielded"))
    call = asyncio.create_task(backend.close(sandbox.id))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    until = time.monotonic() + 10
    while containers(docker_host, "shielded") and time.monotonic() < until:
        await asyncio.sleep(0.1)
    assert containers(docker_host, "shielded") == []


async def test_a_sweep_takes_one_runs_containers_and_folders_and_no_others(backend: DockerBackend, box: Box) -> None:
    orphans = [await backend.acquire(SMALL, labels(f"orphans/g0/e{n}/a0", run="orphans")) for n in range(2)]
    await backend._containers.remove(orphans[0].id)
    assert await backend.sweep("orphans") == (1, 2)
    assert await backend.sweep("orphans") == (0, 0)
    assert await box.out("echo fine") == "fine"


async def test_eight_acquires_at_once_all_come(backend: DockerBackend) -> None:
    made = await asyncio.gather(*(backend.acquire(SMALL, labels(f"eight/g0/e{n}/a0", run="eight")) for n in range(8)))
    results = await asyncio.gather(
        *(backend.run(item.id, Operation(op_id="t0", command="hostname; ls /work", timeout_s=5)) for item in made)
    )
    assert [result.head for result in results] == [b"sandbox\n"] * 8
    assert await backend.sweep("eight") == (8, 8)


async def test_a_paused_sandbox_is_silent_and_not_lost(backend: DockerBackend, box: Box) -> None:
    docker(backend._daemon.docker_host, "pause", box.id)
    with pytest.raises(SandboxError, match="does not answer") as silent:
        await backend.ask(box.id, "t0", wait_s=-5.5)
    assert silent.value.retryable
    docker(backend._daemon.docker_host, "unpause", box.id)
    assert await box.out("echo fine") == "fine"


async def test_more_sandboxes_than_slots_wait_for_a_release(docker_host: str, tmp_path: Path) -> None:
    backend = DockerBackend(docker_host, tmp_path, slots=1)
    first = await backend.acquire(SMALL, labels("slots/g0/e0/a0", run="slots"))
    second = asyncio.create_task(backend.acquire(SMALL, labels("slots/g0/e1/a0", run="slots")))
    await asyncio.sleep(0.5)
    assert not second.done()
    await backend.close(first.id)
    assert (await second).waited_s > 0.4
    await backend.sweep("slots")
    await backend.aclose()


async def test_a_sandbox_that_everybody_forgot_ends_by_itself(
    backend: DockerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.sandbox.container.LEASE_S", 1)
    forgotten = await backend.acquire(SMALL, labels(fresh_attempt(), run="forgotten"))
    await asyncio.sleep(1.5)
    with pytest.raises(SandboxGone, match="the container ended"):
        await backend.run(forgotten.id, Operation(op_id="t0", command="true", timeout_s=1))
    await backend.sweep("forgotten")


def test_a_toolbox_that_is_built_by_several_at_once_stays_where_it_is_mounted(tmp_path: Path) -> None:
    """What replaces it would empty the folder under the sandboxes that have it already."""
    barrier = threading.Barrier(3)

    def build() -> int:
        barrier.wait()
        return build_toolbox(tmp_path).stat().st_ino

    with ThreadPoolExecutor(3) as threads:
        inodes = {future.result() for future in [threads.submit(build) for _ in range(3)]}
    assert inodes == {build_toolbox(tmp_path).stat().st_ino}


async def test_sbxd_refuses_to_run_outside_a_sandbox(backend: DockerBackend, tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(str(await backend._containers.tools() / "sbxd"), str(tmp_path), "0")
    assert await asyncio.wait_for(process.wait(), 5) == 64


async def test_two_stacks_on_one_daemon_leave_each_other_alone(docker_host: str, tmp_path: Path, box: Box) -> None:
    other = DockerBackend(docker_host, tmp_path, slots=1)
    twin = await other.acquire(SMALL, labels(box.attempt))
    assert twin.id != box.id
    assert await other.sweep("test") == (1, 1)
    assert await box.out("echo fine") == "fine"
    await other.aclose()


async def test_an_unknown_image_is_the_users_mistake(backend: DockerBackend) -> None:
    with pytest.raises(InvalidConfig, match="there are: busybox"):
        await backend.acquire(SMALL.__class__(image="windows"), labels(fresh_attempt()))


async def test_the_image_is_the_same_to_the_byte_and_loaded_once(docker_host: str) -> None:
    assert busybox_layer().digest == busybox_layer().digest
    daemon = Daemon(docker_host)
    first = await ensure_image(daemon, "busybox")
    assert await ensure_image(daemon, "busybox") == first
    await daemon.close()
    assert docker(docker_host, "inspect", "-f", "{{.Config.Labels}}", first) == "map[ratchet.image:busybox]"


async def test_a_pruned_image_is_made_again_by_the_retry(backend: DockerBackend) -> None:
    backend._containers._images["busybox"] = "sha256:" + "0" * 64
    attempt = fresh_attempt()
    with pytest.raises(SandboxError, match="its image or itself was removed") as pruned:
        await backend.acquire(SMALL, labels(attempt, run="pruned"))
    assert pruned.value.retryable
    await backend.acquire(SMALL, labels(attempt, run="pruned"))
    assert await backend.sweep("pruned") == (1, 1)


async def test_a_daemon_that_is_not_there_is_retryable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("activities.sandbox.daemon.PAUSES_S", (0.01,))
    backend = DockerBackend(f"unix://{tmp_path}/none.sock", tmp_path, slots=1)
    with pytest.raises(SandboxError, match="no answer from unix://") as unreachable:
        await backend.acquire(SMALL, labels("none/g0/e0/a0"))
    assert unreachable.value.retryable
    await backend.aclose()
