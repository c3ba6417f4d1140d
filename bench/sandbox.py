"""What a sandbox costs to get and to use: `python -m bench.sandbox`.

At 1, 8 and 32 at once: started when it is asked for (create, start, until it answers), taken from the warm pool, taken
and filled from a task's snapshot, one command by `docker exec`, one command through sbxd. Prints the median and the
95th percentile of each, how many times faster than the cold start of the same run its median is, and as its last line
one line of JSON, with the smallest of those ratios. Needs a Docker daemon: DOCKER_HOST, the machine's, or one of its
own where none answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from activities.sandbox.channel import Operation
from activities.sandbox.container import SandboxSpec
from activities.sandbox.docker import DockerBackend, Sandbox
from activities.sandbox.preparation import Preparation
from tasksets import open_taskset
from tasksets.base import Task
from workers.stack.private_daemon import NoDaemon, some_daemon

RUN = "bench-sandbox"
ROUNDS = {1: 8, 8: 3, 32: 2}
"""By how many are asked for at once."""
SPEC = SandboxSpec()
SMALL = open_taskset("shell").load("fix-0001")
LARGE = SMALL.model_copy(
    update={
        "id": "large",
        "setup": "mkdir /work/tree && cd /work/tree && for d in $(seq 20); do mkdir $d && for f in $(seq 50); do "
        "head -c 16384 /dev/zero > $d/$f; done; done",
    }
)
"""1,000 files, 16 MB."""
FULL_S = 120.0
COLD, WARM, SMALL_FORK, LARGE_FORK, EXEC, SBXD = (
    "cold start",
    "warm take",
    "warm take and fork (one file)",
    "warm take and fork (1,000 files, 16 MB)",
    "one command, docker exec",
    "one command, sbxd",
)


class Bench:
    """One daemon; a state folder without a pool and one with a pool of the size that is asked for."""

    def __init__(self, docker_host: str, folder: Path) -> None:
        self._cold = DockerBackend(docker_host, folder / "cold", slots=64)
        self._warm = DockerBackend(docker_host, folder / "warm", slots=64, pool=max(ROUNDS))
        self._preparation = Preparation(self._warm)
        self._made = 0

    async def aclose(self) -> None:
        for backend in (self._cold, self._warm):
            await backend.sweep(RUN)
            await backend.aclose()

    async def measure(self, at_once: int) -> dict[str, list[float]]:
        """Seconds of each operation, `at_once` of them at a time."""
        await self._warm.keep_warm(SPEC)
        found: dict[str, list[float]] = {COLD: [], WARM: [], SMALL_FORK: [], LARGE_FORK: [], EXEC: [], SBXD: []}
        await self._learn(at_once)
        for _ in range(ROUNDS[at_once]):
            times, made = await timed(at_once, lambda: self._acquire(self._cold))
            found[COLD] += times
            found[EXEC] += (await timed_over(made, self._exec))[0]
            found[SBXD] += (await timed_over(made, self._command))[0]
            await self._cold.sweep(RUN)
            for name, task in ((WARM, None), (SMALL_FORK, SMALL), (LARGE_FORK, LARGE)):
                await self._full(at_once)
                times, made = await timed(at_once, lambda task=task: self._acquire(self._warm, task))
                if not all(sandbox.warm for sandbox in made):
                    raise RuntimeError(f"{name}: the pool was full and gave a cold sandbox")
                found[name] += times
                await self._warm.sweep(RUN)
        return found

    async def _learn(self, at_once: int) -> None:
        """Let the pool see the demand, and the snapshots be made."""
        await asyncio.gather(*(self._acquire(self._warm) for _ in range(at_once)))
        for task in (SMALL, LARGE):
            await self._acquire(self._warm, task)
        await self._warm.sweep(RUN)

    async def _full(self, members: int) -> None:
        until = time.monotonic() + FULL_S
        while sum(self._warm.waiting().values()) < members:
            if time.monotonic() > until:
                raise RuntimeError(f"the pool does not fill: {self._warm.waiting()}")
            await asyncio.sleep(0.05)

    async def _acquire(self, backend: DockerBackend, task: Task | None = None) -> Sandbox:
        self._made += 1
        labels = {"kind": "agent", "run": RUN, "attempt": f"{RUN}/g0/e{self._made}/a0"}
        sandbox = await backend.acquire(SPEC, labels)
        if task is not None:
            await self._preparation.prepare(task, sandbox)
        return sandbox

    async def _exec(self, sandbox: Sandbox) -> None:
        async def run(client: Any) -> Any:
            made = await client.containers.container(sandbox.container_id).exec(["true"])
            async with made.start(detach=False) as stream:
                while await stream.read_out() is not None:
                    pass
            return await made.inspect()

        if (await self._cold.daemon.call("exec", run))["ExitCode"] != 0:
            raise RuntimeError("docker exec: true failed")

    async def _command(self, sandbox: Sandbox) -> None:
        if (await self._cold.run(sandbox.id, Operation(op_id="bench", command="true", timeout_s=10))).exit_code != 0:
            raise RuntimeError("sbxd: true failed")


async def timed(count: int, work: Callable[[], Awaitable[Sandbox]]) -> tuple[list[float], list[Sandbox]]:
    """(seconds of each, what each gave) of `count` that begin in one moment."""
    return await timed_over([None] * count, lambda _: work())


async def timed_over(items: list[Any], work: Callable[[Any], Awaitable[Any]]) -> tuple[list[float], list[Any]]:
    async def one(item: Any) -> tuple[float, Any]:
        began = time.monotonic()
        value = await work(item)
        return time.monotonic() - began, value

    done = await asyncio.gather(*(one(item) for item in items))
    return [seconds for seconds, _ in done], [value for _, value in done]


@dataclass(frozen=True)
class Row:
    at_once: int
    name: str
    p50_s: float
    p95_s: float
    speedup: float
    """Median of the cold start, by its own median."""

    def __str__(self) -> str:
        return (
            f"{self.at_once:>3}  {self.name:<40} {self.p50_s * 1e3:>9.1f} {self.p95_s * 1e3:>9.1f} {self.speedup:>9.1f}"
        )


def rows(at_once: int, found: dict[str, list[float]]) -> list[Row]:
    cold = statistics.median(found[COLD])
    made = []
    for name, seconds in found.items():
        p50 = statistics.median(seconds)
        p95 = sorted(seconds)[round(0.95 * (len(seconds) - 1))]
        made.append(Row(at_once, name, p50, p95, cold / p50))
    return made


def summary(table: list[Row]) -> dict[str, Any]:
    """The smallest ratio over all numbers at once, and each."""

    def ratios(name: str) -> dict[str, float]:
        return {str(row.at_once): round(row.speedup, 1) for row in table if row.name == name}

    return {
        "bench": "sandbox",
        "warm_take_speedup": min(ratios(WARM).values()),
        "fork_speedup": min(ratios(SMALL_FORK).values()),
        "warm_take_speedup_by_at_once": ratios(WARM),
        "fork_speedup_by_at_once": ratios(SMALL_FORK),
        "large_fork_speedup_by_at_once": ratios(LARGE_FORK),
        "p50_ms": {f"{row.name} x{row.at_once}": round(row.p50_s * 1e3, 2) for row in table},
    }


async def run(docker_host: str) -> list[Row]:
    table: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as folder:
        bench = Bench(docker_host, Path(folder))
        try:
            print(f"{'K':>3}  {'operation':<40} {'p50 ms':>9} {'p95 ms':>9} {'x cold':>9}")
            for at_once in ROUNDS:
                measured = rows(at_once, await bench.measure(at_once))
                print(*measured, sep="\n", flush=True)
                table += measured
        finally:
            await bench.aclose()
    return table


def main() -> None:
    # So that what was started is removed then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with some_daemon(os.environ.get("RATCHET_DOCKER_HOST") or os.environ.get("DOCKER_HOST", "")) as docker_host:
            table = asyncio.run(run(docker_host))
    except NoDaemon as error:
        sys.exit(str(error))
    print(json.dumps(summary(table)))


if __name__ == "__main__":
    main()
