"""What durability costs: `python -m bench.durability [--rounds N] [--quick]`.

The same episodes run as Temporal workflows and in a plain asyncio loop that calls the same activity functions with the
same messages, side by side in turns. Generation time is held constant by a stub engine at the HTTP seam; everything on
our side of it is real: containers, object store, database, server, worker. Needs Docker; brings up a stack of its own
and takes it down.

Prints, for each generation time, the seconds that a group of siblings took either way and the overhead in percent; the
processor time of server and worker per turn, and of the plain loop, whose share of it is the work itself. The last line
is JSON: `overhead_pct` by generation seconds as strings, `cpu_ms_per_turn` of the control plane alone (server + worker
- plain loop), and the parts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import httpx
from temporalio.client import Client

from bench.measure import cpu_s, finish, median_of, overhead_pct, say, table
from bench.own_stack import PROJECT, OwnStack, free_ports, own_stack, until
from bench.plain_loop import PlainLoop
from bench.stub_engine import TURNS
from storage.database import session
from storage.tables import Run
from tasksets import open_taskset, pick
from workers import parts
from workers.settings import Settings
from workers.temporal import connect
from workflows.contracts import GroupInput, Queue, RolloutLimits, RunState, Split

RUN = "bench-durability"
PARTS = ("temporal", "s3", "docker", "prepare")
SECONDS = (0.05, 0.3, 1.0, 5.0)
QUICK_SECONDS = (0.3, 1.0)
LIMITS = RolloutLimits(
    temperature=1.0,
    max_turns=8,
    max_tokens_per_turn=64,
    max_tokens=512,
    context_length=2048,
    step_timeout_s=10,
    time_budget_s=60,
    max_output_chars=300,
    malformed_reminders=1,
)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the medians are given")
    parser.add_argument("--group-size", type=int, default=8, help="episodes at once")
    parser.add_argument("--groups", type=int, default=2, help="groups, one after the other, per round and side")
    parser.add_argument("--quick", action="store_true", help="one round of one group, two generation times")
    options = parser.parse_args(argv)
    options.seconds = QUICK_SECONDS if options.quick else SECONDS
    if options.quick:
        options.rounds = options.groups = 1
    return options


class Sides:
    """The two ways to run the same groups. `measure` gives seconds per group and processor seconds by who used them."""

    def __init__(self, stack: OwnStack, worker: subprocess.Popen[bytes], client: Client, plain: PlainLoop, model: str):
        self._client, self._plain, self._model = client, plain, model
        self._pids = {"server": stack.pid("temporal"), "worker": worker.pid}
        self._number = 0

    async def measure(self, side: str, groups: int, group_size: int) -> dict[str, float]:
        before = {name: cpu_s(pid) for name, pid in self._pids.items()}
        mine, began = time.process_time(), time.monotonic()
        for _ in range(groups):
            group = self._group(group_size)
            if side == "plain":
                await self._plain.group(group)
            else:
                await self._client.execute_workflow("Group", group, id=group.group_id, task_queue=Queue.EPISODES)
        spent = {"seconds": (time.monotonic() - began) / groups, "plain_cpu": time.process_time() - mine}
        # The release of the last sandboxes may go on; it is part of either side.
        return spent | {f"{name}_cpu": cpu_s(pid) - before[name] for name, pid in self._pids.items()}

    def _group(self, group_size: int) -> GroupInput:
        """The next group, on the next task of the taskset's order."""
        number, self._number = self._number, self._number + 1
        return GroupInput(
            run=RUN,
            number=number,
            model=self._model,
            task=pick(open_taskset("shell"), Split.TRAIN, 0, number, 1)[0],
            group_size=group_size,
            max_replacements=0,
            limits=LIMITS,
            seed=number,
            report_to=RUN,
        )


async def rounds(sides: Sides, engine: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """One row of figures per round; names are `<generation seconds>/<figure>`."""
    async with httpx.AsyncClient() as http:
        for side in ("plain", "ours"):
            await sides.measure(side, 1, options.group_size)
        taken = []
        for number in range(options.rounds):
            row: dict[str, float] = {}
            for seconds in options.seconds:
                await http.post(f"{engine}/bench/seconds", json={"seconds": seconds})
                for side in ("plain", "ours") if number % 2 == 0 else ("ours", "plain"):
                    found = await sides.measure(side, options.groups, options.group_size)
                    say(f"round {number + 1}: {seconds:g} s, {side}: {found['seconds']:.2f} s a group")
                    row |= {f"{seconds:g}/{side}/{name}": value for name, value in found.items()}
            taken.append(row)
    return taken


def summarize(rows: Sequence[dict[str, float]], options: argparse.Namespace) -> dict[str, object]:
    """Prints the table; returns the last line."""
    turns = options.groups * options.group_size * TURNS
    medians = median_of([_figures(row, options.seconds, turns) for row in rows])
    lines = [
        [f"{seconds:g} s", *(medians[f"{seconds:g}/{name}"] for name in COLUMNS.values())]
        for seconds in options.seconds
    ]
    print(f"{options.rounds} rounds, {options.group_size} episodes of {TURNS} turns at once; medians\n")
    print(table(["generation", *COLUMNS], lines))
    reference = f"{1.0 if 1.0 in options.seconds else options.seconds[-1]:g}"
    return {
        "overhead_pct": {f"{seconds:g}": round(medians[f"{seconds:g}/overhead"], 2) for seconds in options.seconds},
        "cpu_ms_per_turn": round(medians[f"{reference}/control"], 1),
        "server_cpu_ms_per_turn": round(medians[f"{reference}/server"], 1),
        "worker_cpu_ms_per_turn": round(medians[f"{reference}/worker"], 1),
        "plain_cpu_ms_per_turn": round(medians[f"{reference}/plain"], 1),
        "turns_per_episode": TURNS,
        "episodes_at_once": options.group_size,
        "rounds": options.rounds,
    }


COLUMNS = {
    "plain s": "plain_s",
    "durable s": "ours_s",
    "overhead %": "overhead",
    "server CPU ms/turn": "server",
    "worker CPU ms/turn": "worker",
    "plain loop CPU ms/turn": "plain",
    "control plane CPU ms/turn": "control",
}


def _figures(row: dict[str, float], seconds: Sequence[float], turns: int) -> dict[str, float]:
    """The figures of one round by `<generation seconds>/<name>`; processor times in ms per turn."""
    found: dict[str, float] = {}
    for each in seconds:
        key = f"{each:g}"
        ours_s, plain_s = row[f"{key}/ours/seconds"], row[f"{key}/plain/seconds"]
        server, worker = (1000 * row[f"{key}/ours/{name}_cpu"] / turns for name in ("server", "worker"))
        plain = 1000 * row[f"{key}/plain/plain_cpu"] / turns
        values = {"ours_s": ours_s, "plain_s": plain_s, "overhead": overhead_pct(ours_s, plain_s)}
        values |= {"server": server, "worker": worker, "plain": plain, "control": server + worker - plain}
        found |= {f"{key}/{name}": value for name, value in values.items()}
    return found


# --- the two sides' world -----------------------------------------------------------------------------------------


@contextmanager
def stub_engine(model: Path, port: int, env: dict[str, str]) -> Iterator[str]:
    """A stub engine in its own process, for the time of the block; its URL."""
    command = [sys.executable, "-m", "bench.stub_engine", "--port", str(port), "--model", str(model)]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([*command, "--label", f"{RUN}:0"], cwd=PROJECT, env=env)
    try:
        until("the stub engine", lambda: _answers(f"{url}/health"))
        yield url
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


def tokenizer_folder(folder: Path) -> Path:
    """A model folder that holds what the stub and the activities need of one: the tiny policy's tokenizer."""
    from workers.bootstrap.tiny import build_tokenizer

    build_tokenizer().save_pretrained(folder)
    return folder


@asynccontextmanager
async def plain_side(settings: Settings, client: Client) -> AsyncIterator[PlainLoop]:
    """The activities as the rollout worker makes them, in this process."""
    async with AsyncExitStack() as stack:
        backend = await parts.sandbox_backend(settings, client, stack)
        generation = await parts.generation(settings, stack)
        yield PlainLoop(generation, parts.sandbox(settings, backend), parts.lineage(settings, client))


async def compare(stack: OwnStack, model: Path, port: int, options: argparse.Namespace) -> list[dict[str, float]]:
    settings = stack.settings()
    with session(parts.database(settings)) as opened:
        opened.add(
            Run(
                id=RUN,
                state=RunState.RUNNING,
                config={},
                mode="async",
                seed=0,
                execution=RUN,
                temporal_namespace="",
                started_at=time.time(),
            )
        )
    client = await connect(settings, role="bench")
    with stub_engine(model, port, stack.env) as engine, stack.worker("rollout") as worker:
        async with plain_side(settings, client) as plain:
            return await rounds(Sides(stack, worker, client, plain, str(model)), engine, options)


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-model-") as folder:
        model = tokenizer_folder(Path(folder))
        (port,) = free_ports(0, 1)
        extra = {
            "RATCHET_ENGINES": f"local-e0=http://127.0.0.1:{port}",
            "RATCHET_SANDBOX_SLOTS": str(2 * options.group_size),
        }
        with own_stack(None, PARTS, extra=extra) as stack:
            rows = asyncio.run(compare(stack, model, port, options))
    finish(summarize(rows, options))
    # The SDK's threads can abort the interpreter at its normal exit.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
