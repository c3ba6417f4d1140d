"""What an agent does to its sandbox, and who is blamed."""

from __future__ import annotations

import asyncio
import time

import pytest

from activities.sandbox.container import SandboxSpec
from activities.sandbox.docker import DockerBackend
from activities.sandbox.evidence import SandboxGone, broken_by_agent
from tests.sandbox.conftest import Box, MakeBox, opened

pytestmark = pytest.mark.docker


async def processes(box: Box) -> list[str]:
    """Command lines of the agent's processes, as root sees them."""
    listed = await box.out("ps -o user,args | grep ^agent || :", root=True)
    return [line.split(maxsplit=1)[1] for line in listed.splitlines()]


async def timed(box: Box, command: str, timeout_s: float) -> float:
    """Seconds past its time-out until the answer came."""
    began = time.monotonic()
    result = await box(command, timeout_s=timeout_s)
    assert result.timed_out
    assert result.exit_code is None
    assert broken_by_agent(result) == ""
    return time.monotonic() - began - timeout_s


@pytest.mark.parametrize(
    "command",
    [
        "sleep 1000",
        "trap '' TERM INT HUP; while :; do sleep 1; done",
        "setsid sh -c 'trap \"\" TERM HUP; sleep 1000' & sleep 1000",
        "env -i setsid sh -c '(setsid sleep 1000 &) & sleep 1000' & wait",
        "exec >&- 2>&-; sleep 1000",
        "echo 'sh b & sh b & sleep 1; sh b' > b; (sh b &) 2>/dev/null; exec sleep 1000",
    ],
    ids=["hangs", "ignores TERM", "escapes its session", "daemonises", "closes its output", "is a fork bomb"],
)
async def test_a_time_out_ends_a_command_and_all_that_came_of_it(shared_box: Box, command: str) -> None:
    assert await timed(shared_box, command, 0.5) < 2.0
    assert await processes(shared_box) == []
    assert await shared_box.out("echo fine") == "fine"


async def test_a_time_out_spares_what_earlier_commands_left_running(box: Box) -> None:
    await box("sleep 1000 &")
    await box("sleep 2000", timeout_s=0.3)
    assert await processes(box) == ["sleep 1000"]


async def test_endless_output_ends_with_the_time_out(box: Box) -> None:
    assert await timed(box, "yes", 0.5) < 2.0


async def test_a_fork_bomb_that_still_holds_is_the_agents_doing(box: Box) -> None:
    result = await box("while :; do sleep 1000 & done")
    assert "fork bomb holds" in broken_by_agent(result)
    last = asyncio.create_task(box("exec sleep 1000"))
    await asyncio.sleep(0.2)
    refused = await box("echo unreachable")
    assert refused.exit_code is None
    assert "EAGAIN" in broken_by_agent(refused)
    await box.backend.kill_agent(box.id)
    assert (await last).signal == 9
    assert await box.out("echo fine") == "fine"


async def test_a_fork_bomb_never_leaves_a_command_without_an_answer(any_box: Box) -> None:
    for _ in range(3):
        result = await any_box("bomb() { bomb | bomb & }; bomb; bomb; bomb", timeout_s=2)
        assert result.seconds < 4


async def test_a_command_that_finds_no_room_for_itself_is_answered_over_the_daemon_too(
    exec_backend: DockerBackend, make_box: MakeBox
) -> None:
    """The daemon says that it started it, and nothing ran: there is no result to wait for."""
    box = await make_box(exec_backend)
    await box("awk 'BEGIN { while (1) system(\"sleep 1000 &\") }' 2>/dev/null &", timeout_s=5)
    await asyncio.sleep(1)
    refused = await box("echo unreachable", timeout_s=5)
    assert "no command can be started" in broken_by_agent(refused)
    await box.backend.kill_agent(box.id)
    assert await box.out("echo fine") == "fine"


async def test_eating_memory_is_the_agents_doing(any_box: Box) -> None:
    result = await any_box("x=a; while :; do x=$x$x$x; done", timeout_s=20)
    assert "out of memory" in broken_by_agent(result)


async def test_filling_the_disk_is_the_agents_doing_and_stays_inside(shared_box: Box) -> None:
    result = await shared_box("cat /dev/zero > big; echo $?")
    assert b"No space left" in result.head
    assert broken_by_agent(result) == "its disk is full: /work"
    freed = await shared_box("rm big; echo x > small")
    assert broken_by_agent(freed) == ""


async def test_running_out_of_inodes_is_a_full_disk(box: Box) -> None:
    result = await box("mkdir d && cd d && seq 1 20000 | xargs -n 500 touch", timeout_s=20)
    assert broken_by_agent(result) == "its disk is full: /work"


async def test_process_1_can_not_be_killed_from_inside(shared_box: Box) -> None:
    await shared_box("kill -9 1; kill -TERM 1; kill -9 -1")
    assert await shared_box.out("echo fine") == "fine"


async def test_the_system_can_not_be_removed(shared_box: Box) -> None:
    await shared_box("rm -rf /bin /etc /run /usr / 2>/dev/null")
    assert await shared_box.out("echo fine") == "fine"
    assert await shared_box.out("echo fine | grep -c fine", root=True) == "1"


async def test_killing_the_agents_processes_spares_none(shared_box: Box) -> None:
    await shared_box("for i in 1 2 3; do setsid sh -c 'trap \"\" TERM; sleep 1000' & done")
    await shared_box.backend.kill_agent(shared_box.id)
    assert await processes(shared_box) == []


async def test_a_first_process_that_the_memory_limit_took_is_the_agents_doing(backend: DockerBackend) -> None:
    async with opened(backend, SandboxSpec(memory_mb=64, work_mb=62, data_mb=1, tmp_mb=62, processes=48)) as box:
        # Memory that no victim gives back: files. Then there is nobody left but process 1.
        with pytest.raises(SandboxGone) as gone:
            await box("cat /dev/zero > /work/a & cat /dev/zero > /tmp/b; wait", timeout_s=15)
            for number in range(40):
                # Each takes what the last one's death gave back, to the page.
                await box(f"cat /dev/zero >> /work/a; cat /dev/zero > /tmp/c{number}; :", timeout_s=5)
        assert gone.value.by_agent
        assert not gone.value.retryable
