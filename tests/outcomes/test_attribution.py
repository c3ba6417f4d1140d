"""Time budgets count the agent's own commands alone, and a hostile command hurts its own episode alone.

Where each hostile command is tested besides:

- hangs, ignores SIGTERM, escapes its session, daemonises, closes its output, endless output: the time-out and what is
  left of it in tests/sandbox/test_hostile.py; here that the episode goes on and ends by its verdict
- fork bomb, full disk and inodes, memory, process 1, `rm -rf /`: the counters in tests/sandbox/test_hostile.py, the
  ending and its evidence in tests/outcomes/test_table.py; here that host and neighbours stand it
- floods and invalid UTF-8: the bytes in tests/sandbox/test_commands.py; here a whole gigabyte through an episode
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from activities.sandbox.channel import Operation
from activities.sandbox.container import SandboxSpec
from activities.sandbox.daemon import docker_root
from activities.sandbox.docker import DockerBackend
from tests.outcomes.engine import ScriptedEngine, serving
from tests.outcomes.rows import FAILURE, SUCCESS
from tests.outcomes.worlds import DONE, FAILURE_REWARD, LABEL, RUN, SOLVE, Ending, Row, World, bash
from workflows.contracts import Outcome, StopReason

pytestmark = [pytest.mark.outcomes, pytest.mark.docker]
STEP_S = 2.0
LONG_STEP_S = 15.0
"""For what takes its time on a busy machine before it has an effect."""
GRACE_S = 2.0
DAEMON = "(setsid sh -c 'trap \"\" HUP; (setsid sleep 1000 &) & sleep 1000' &) &"
HUNDRED = "for i in $(seq 100); do sleep 1000 & done 2>/dev/null"
BOMB = "while :; do sleep 1000 & done"


def patient(id: str) -> Row:
    """An episode whose commands take nothing, under a time budget that any waiting would use up."""
    says = [bash("cat /data/word"), bash(SOLVE), DONE]
    return Row(id, says, StopReason.FINISHED, SUCCESS, 1.0, limits={"time_budget_s": 1.5, "step_timeout_s": 1.5})


def limits(step_s: float) -> dict[str, float]:
    return {"step_timeout_s": step_s, "time_budget_s": 3 * step_s}


def survives(id: str, command: str, *, timed_out: bool, step_s: float = STEP_S) -> Row:
    """The agent does this, goes on and solves its task."""
    says = [bash(command), bash(f"rm -f out; {SOLVE}"), DONE]
    ended = {"timed out": str(timed_out)}
    return Row(id, says, StopReason.FINISHED, SUCCESS, 1.0, limits=limits(step_s), evidence=ended)


def ends(id: str, command: str) -> Row:
    reason = StopReason.SANDBOX_KILLED_BY_AGENT
    return Row(id, [bash(command), DONE], reason, FAILURE, FAILURE_REWARD, limits=limits(LONG_STEP_S))


HOSTILE = [
    survives("hangs", "sleep 1000", timed_out=True),
    survives("ignores-TERM", "trap '' TERM INT HUP; while :; do sleep 1; done", timed_out=True),
    survives("daemonises", f"{DAEMON} echo gone", timed_out=False, step_s=LONG_STEP_S),
    survives("leaves-a-hundred", f"{HUNDRED}; :", timed_out=False, step_s=LONG_STEP_S),
    survives("floods-a-gigabyte", "head -c 1000000000 /dev/zero", timed_out=False, step_s=2 * LONG_STEP_S),
    survives("prints-invalid-utf-8", r"printf '\377\376\000\303('", timed_out=False, step_s=LONG_STEP_S),
    survives("deletes-bin", "rm -rf /bin /usr/bin /etc 2>/dev/null; :", timed_out=False, step_s=LONG_STEP_S),
    survives("kills-process-1", "kill -9 1; kill -9 -1", timed_out=False, step_s=LONG_STEP_S),
    ends("fork-bombs", BOMB),
    ends("fills-the-disk", "cat /dev/zero > big"),
    ends("eats-memory", "x=a; while :; do x=$x$x$x; done"),
    ends("kills-its-shell", "kill -9 $$"),
]
SLOW, PAUSED, COLD = patient("engine-slowed"), patient("paused-for-weights"), patient("cold-sandbox")
ROWS = [SLOW, PAUSED, COLD, *HOSTILE]
GENERATION_S = 1.0


@dataclass
class Scene:
    engine: ScriptedEngine
    world: World
    close: Callable[[], Any] = field(default=lambda: None)


@pytest.fixture(scope="module")
async def scene(open_world: Callable[..., Any]) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        engine = ScriptedEngine({row.id: row.says for row in ROWS}, label=LABEL)
        info = await stack.enter_async_context(serving(engine))
        yield Scene(engine, await stack.enter_async_context(open_world(rows=ROWS, engines=[info])))


def solved(ending: Ending) -> bool:
    return (ending.summary.outcome, ending.summary.reward) == (Outcome.MODEL_SUCCESS, 1.0)


async def test_an_engine_ten_times_slower_changes_no_outcome(scene: Scene) -> None:
    scene.engine.delay_s = GENERATION_S
    try:
        ending = await scene.world.play(SLOW)
    finally:
        scene.engine.delay_s = 0
    assert solved(ending)
    assert ending.recorded is not None and ending.recorded.generate_s > 3 * GENERATION_S


async def test_a_pause_for_weights_in_mid_request_changes_no_outcome(scene: Scene) -> None:
    scene.engine.running.clear()
    playing = asyncio.create_task(scene.world.play(PAUSED))
    await scene.engine.asked[PAUSED.id].wait()
    await asyncio.sleep(2.5)
    scene.engine.label = f"{RUN}:4"
    scene.engine.running.set()
    ending = await playing
    assert solved(ending)
    assert ending.recorded is not None
    assert (ending.recorded.min_version, ending.recorded.max_version) == (3, 4)


async def test_a_cold_sandbox_changes_no_outcome(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    start = DockerBackend._start

    async def slowly(*arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(3)
        return await start(*arguments, **options)

    monkeypatch.setattr(DockerBackend, "_start", slowly)
    ending = await scene.world.play(COLD)
    assert solved(ending)
    assert ending.recorded is not None and ending.recorded.boot_s > 3


@dataclass
class Aftermath:
    """What the hostile episodes left: their endings, the slowest answer of a neighbour, the host before and after."""

    endings: dict[str, Ending]
    slowest_s: float
    disk_lost_mb: float
    memory_lost_mb: float
    left: list[str]


@pytest.fixture(scope="module")
async def aftermath(scene: Scene, boxes: DockerBackend) -> Aftermath:
    """All hostile agents at once, beside a neighbour that is asked for its answer all the time."""
    attempt = f"{RUN}/neighbour/e0/a0"
    neighbour = await boxes.acquire(SandboxSpec(), {"kind": "agent", "run": RUN, "attempt": attempt})
    root = await docker_root(boxes.daemon) or Path("/")
    disk, memory = psutil.disk_usage(str(root)).free, psutil.virtual_memory().available
    asking, slowest = True, 0.0

    async def ask() -> None:
        nonlocal slowest
        count = 0
        while asking:
            count, began = count + 1, time.monotonic()
            result = await boxes.run(neighbour.id, Operation(op_id=f"ask-{count}", command="echo here", timeout_s=20))
            assert result.head == b"here\n"
            slowest = max(slowest, time.monotonic() - began)
            await asyncio.sleep(0.2)

    asked = asyncio.create_task(ask())
    endings = await asyncio.gather(*(scene.world.play(row) for row in HOSTILE))
    asking = False
    await asked
    await boxes.close(neighbour.id)
    return Aftermath(
        dict(zip((row.id for row in HOSTILE), endings, strict=True)),
        slowest,
        (disk - psutil.disk_usage(str(root)).free) / 1e6,
        (memory - psutil.virtual_memory().available) / 1e6,
        _agents_processes(),
    )


def _agents_processes() -> list[str]:
    """Processes of the agent's uid that say what only hostile agents here do."""
    found = []
    for process in psutil.process_iter(["uids", "cmdline"]):
        uids, words = process.info["uids"], process.info["cmdline"] or []
        if uids is not None and uids.real == 1000 and "1000" in words:
            found.append(" ".join(words))
    return found


@pytest.mark.parametrize("row", HOSTILE, ids=lambda row: row.id)
async def test_a_hostile_command_gives_the_tables_value_in_its_time(aftermath: Aftermath, row: Row) -> None:
    ending = aftermath.endings[row.id]
    assert (ending.summary.stop_reason, ending.summary.outcome) == (row.stop_reason, row.outcome)
    assert ending.summary.reward == row.reward
    assert ending.left == set()
    first = ending.turns[0]
    if row.evidence:
        assert str(first.timed_out) == row.evidence["timed out"]
    assert ending.recorded is not None and first.act_s < _bound(ending, row)


def _bound(ending: Ending, row: Row) -> float:
    """Step time-out and two seconds. Where evidence was gathered, the canary's time is the host's."""
    canary = ending.recorded.evidence.get("canary", "") if ending.recorded else ""
    words = canary.split()
    return row.limit().step_timeout_s + GRACE_S + (float(words[2]) if words[:2] == ["answered", "in"] else 0.0)


def test_hostile_agents_leave_the_host_and_their_neighbours_unharmed(aftermath: Aftermath) -> None:
    assert aftermath.left == []
    assert aftermath.slowest_s < 10
    assert aftermath.disk_lost_mb < 500
    assert aftermath.memory_lost_mb < 2000
