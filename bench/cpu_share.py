"""Does a correct answer stay correct on a busy host? `python -m bench.cpu_share`.

A solution that counts to a number is gated at twice the time it takes on the host as it is. Then the host gets load,
and the same solution runs with Docker's default weight for all sandboxes together and with the raised one. Prints each
median as a ratio to the unloaded one, and how many of the runs pass the gate; the last line is JSON, with `ratio` of
the raised weight to Docker's default. Needs root and a Docker daemon, in a control group of its own: sandboxes of a
running stack keep theirs.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from activities.sandbox.cgroup import TIMES, raise_share, share
from activities.sandbox.channel import Operation
from activities.sandbox.container import SandboxSpec
from activities.sandbox.docker import DockerBackend
from bench.measure import finish

PARENT = "/ratchet-bench"
RUN = "bench-cpu-share"
ROUNDS = 5
GATE = 2.0
LOAD_PER_CPU = 4
COUNT = "i=0; while [ $i -lt 1000000 ]; do i=$((i+1)); done"


@contextmanager
def load() -> Iterator[None]:
    """Greedy processes beside the sandboxes, as a trainer and an engine are."""
    count = LOAD_PER_CPU * (os.cpu_count() or 1)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


async def seconds(backend: DockerBackend, sandbox_id: str, name: str) -> list[float]:
    """What the solution took in each round, as it was measured inside the sandbox."""
    taken = []
    for number in range(ROUNDS):
        op = Operation(op_id=f"{name}-{number}", command=COUNT, timeout_s=120)
        taken.append((await backend.run(sandbox_id, op)).seconds)
    return taken


async def measure(docker_host: str) -> None:
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as state:
        backend = DockerBackend(docker_host, Path(state), slots=1, parent=PARENT)
        try:
            labels = {"kind": "agent", "run": RUN, "attempt": f"{RUN}/g0/e0/a0"}
            sandbox = await backend.acquire(SandboxSpec(), labels)
            if share(PARENT) != TIMES:
                sys.exit("this process may not set the weight of the sandboxes")
            quiet = statistics.median(await seconds(backend, sandbox.id, "quiet"))
            print(f"no load of ours          1.00  ({quiet:.2f} s; the gate is at {GATE:.1f} times that)")
            ratios = dict[str, float]()
            with load():
                for name, times in (("Docker's default weight", 1), ("raised weight", TIMES)):
                    raise_share(PARENT, times=times)
                    taken = await seconds(backend, sandbox.id, name)
                    passed = sum(one <= GATE * quiet for one in taken)
                    ratios[name] = statistics.median(taken) / quiet
                    print(f"{name:<24} {ratios[name]:.2f}  ({passed} of {len(taken)} pass the gate)")
            default, raised = ratios.values()
            finish({"ratio": round(raised / default, 3), "slower_by_default": round(default, 2)})
        finally:
            await backend.sweep(RUN)
            await backend.aclose()


if __name__ == "__main__":
    asyncio.run(measure(os.environ.get("RATCHET_DOCKER_HOST", "")))
