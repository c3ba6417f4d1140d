"""What the control plane costs per episode, from 16 episodes to 65,536: `python -m bench.scale [--sizes 16,256,1024]`.

Each size is one TrainingRun on a Temporal server of its own, with the product's workflows, converter, worker tuning and
lineage database; engines, sandboxes and trainer are simulated and take no processor time of note (bench/simulated.py).
Activity times are simulated too: `--seconds` (0 by default) that a generation takes. They cost the control plane
nothing but a heartbeat every three seconds, which is why the default leaves them out.

`--most-real N` (1,024 by default): a run of more episodes plays N of them as workflows, evenly spread, and one activity
per other group tells the rows of its episodes. TrainingRun, admission, pool and the database still carry every group
and episode. What a told group costs is measured by itself, in a run of told groups alone, and taken away before the
division. `--sizes 16,256,4096,65536 --most-real 65536` plays all of them, which takes hours on two cores.

Prints one row per size. The last line is JSON with the same figures.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from temporalio.client import Client, WorkflowHistory

from bench.measure import cpu_s, finish, positive_ints, say, table
from bench.own_stack import PROJECT, OwnStack, own_stack, until
from bench.sampled_group import MARK
from storage.migrations import migrate
from workers.temporal import connect
from workflows.contracts import Queue

SIZES = "16,256,1024"
QUICK_SIZES = "16,64"
GROUP_SIZE = 8
GROUPS_PER_BATCH = 32
MOST_IN_FLIGHT = 256
ROLES = ("control", "rollout")
TOLD_GROUPS = 128
COLUMNS = (
    "episodes",
    "played",
    "seconds",
    "cpu_ms_per_episode",
    "server_cpu_ms",
    "rollout_cpu_ms",
    "control_cpu_ms",
    "cpu_ms_per_turn",
    "episode_events",
    "episode_bytes",
    "group_events",
    "run_events_per_group",
    "temporal_bytes_per_episode",
    "lineage_rows_per_episode",
    "lineage_bytes_per_episode",
)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=positive_ints, default=positive_ints(SIZES), help="episodes, e.g. 16,256,4096")
    parser.add_argument("--turns", type=int, default=4, help="turns per episode")
    parser.add_argument("--seconds", type=float, default=0.0, help="simulated time of a generation")
    parser.add_argument("--most-real", type=int, default=1024, help="episodes of a run that are played as workflows")
    parser.add_argument("--quick", action="store_true", help=f"sizes {QUICK_SIZES}")
    options = parser.parse_args(argv)
    if options.quick:
        options.sizes = positive_ints(QUICK_SIZES)
    return options


def stride(episodes: int, most_real: int) -> int:
    """Of how many groups one is played, so that at most `most_real` episodes are."""
    return max(1, -(-episodes // max(most_real, GROUP_SIZE)))


def run_config(episodes: int) -> dict[str, object]:
    """A run that collects so many episodes: at least two groups a batch, every group one that may train."""
    groups = max(2, episodes // GROUP_SIZE)
    per_batch = min(GROUPS_PER_BATCH, groups)
    return {
        "model": "simulated",
        "taskset": "shell",
        # Waves admit exactly what a batch needs: no group is cancelled at the end.
        "mode": "sync",
        "max_concurrent_episodes": min(MOST_IN_FLIGHT, groups * GROUP_SIZE),
        "rollout": {"group_size": GROUP_SIZE, "groups_per_batch": per_batch},
        "training": {"steps": groups // per_batch},
        "evaluation": {"tasks": 0},
    }


class ScaleRun:
    """One run on a server of its own."""

    def __init__(self, stack: OwnStack, turns: int, seconds: float) -> None:
        self._stack, self._turns, self._seconds = stack, turns, seconds
        self.database = stack.home / "ratchet.db"

    @contextmanager
    def workers(self) -> Iterator[dict[str, int]]:
        """The pids of the control plane's processes by name, workers ready."""
        migrate(f"sqlite:///{self.database}")
        _model_folder(self._stack.home / "models" / "simulated")
        for role in ROLES:
            self._ready(role).unlink(missing_ok=True)
        with ExitStack() as ending:
            pids = {"server": self._stack.pid("temporal")}
            for role in ROLES:
                command = [sys.executable, "-m", "bench.simulated", role, "--folder", str(self._stack.home)]
                command += ["--turns", str(self._turns), "--seconds", str(self._seconds)]
                process = subprocess.Popen(command, cwd=PROJECT, env=self._stack.env)
                ending.callback(_end, process)
                until(f"the worker {role}", self._ready(role).exists)
                pids[role] = process.pid
            yield pids

    def _ready(self, role: str) -> Path:
        return self._stack.home / f"{role}.ready"

    async def measure(self, client: Client, run: str, config: dict[str, object], pids: Mapping[str, int]) -> Spent:
        """Play the run to its end. Ends the command where it makes fewer steps than it was asked for."""
        before = {name: cpu_s(pid) for name, pid in pids.items()}
        began = time.monotonic()
        status = await client.execute_workflow("TrainingRun", config, id=run, task_queue=Queue.CONTROL)
        if status["step"] != status["steps"]:
            sys.exit(f"{run} ended at step {status['step']} of {status['steps']}: {status['reason']}")
        spent = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
        return Spent(time.monotonic() - began, spent)


class Spent:
    """Seconds on the clock, and processor seconds by process."""

    def __init__(self, seconds: float, cpu: Mapping[str, float]) -> None:
        self.seconds, self.cpu = seconds, dict(cpu)


async def measure(stack: OwnStack, episodes: int, options: argparse.Namespace) -> dict[str, float]:
    """The figures of one size."""
    every = stride(episodes, options.most_real)
    config = run_config(episodes)
    run = f"scale-{episodes}x{options.turns}{MARK}{every}"
    one = ScaleRun(stack, options.turns, options.seconds)
    with one.workers() as pids:
        client = await connect(stack.settings(), role="bench")
        told, told_bytes = {name: 0.0 for name in pids}, 0.0
        # The first run of a server and of workers pays for imports and caches.
        await one.measure(client, f"warm-up-{options.turns}", run_config(2 * GROUP_SIZE), pids)
        if every > 1:
            none, before = run_config(TOLD_GROUPS * GROUP_SIZE), _sizes(stack.home)
            spent = await one.measure(client, f"told{MARK}{10**9}", none, pids)
            groups = _count(one.database, "SELECT count(*) FROM \"group\" WHERE run LIKE 'told%'")
            told = {name: value / groups for name, value in spent.cpu.items()}
            told_bytes = (_sizes(stack.home)["temporal"] - before["temporal"]) / groups
        before = _sizes(stack.home)
        rows_before = _rows(one.database)
        spent = await one.measure(client, run, config, pids)
        grown = {name: size - before[name] for name, size in _sizes(stack.home).items()}
        rows = _rows(one.database) - rows_before
        groups = _count(one.database, f"SELECT count(*) FROM \"group\" WHERE run = '{run}'")
        histories = await _histories(client, run)
    played_groups = -(-groups // every)
    played, carried = played_groups * GROUP_SIZE, groups * GROUP_SIZE
    cpu = {name: 1000 * (value - told[name] * (groups - played_groups)) / played for name, value in spent.cpu.items()}
    total = sum(cpu.values())
    return {
        "episodes": episodes,
        "played": played,
        "seconds": spent.seconds,
        "cpu_ms_per_episode": total,
        "server_cpu_ms": cpu["server"],
        "rollout_cpu_ms": cpu["rollout"],
        "control_cpu_ms": cpu["control"],
        "cpu_ms_per_turn": total / options.turns,
        "temporal_bytes_per_episode": (grown["temporal"] - told_bytes * (groups - played_groups)) / played,
        "lineage_rows_per_episode": rows / carried,
        "lineage_bytes_per_episode": grown["ratchet"] / carried,
        **{name: value / groups if name == "run_events_per_group" else value for name, value in histories.items()},
    }


async def _histories(client: Client, run: str) -> dict[str, float]:
    """Events and bytes of an episode's, a group's and the run's histories."""
    episode = await client.get_workflow_handle(f"{run}/g0/e0/a0").fetch_history()
    group = await client.get_workflow_handle(f"{run}/g0").fetch_history()
    events = 0
    async for execution in client.list_workflows(f"WorkflowId = '{run}'"):
        history = await client.get_workflow_handle(run, run_id=execution.run_id).fetch_history()
        events += len(history.events)
    return {
        "episode_events": len(episode.events),
        "episode_bytes": _bytes(episode),
        "group_events": len(group.events),
        "run_events_per_group": events,
    }


def _bytes(history: WorkflowHistory) -> int:
    return sum(event.ByteSize() for event in history.events)


def _sizes(home: Path) -> dict[str, int]:
    """Bytes of the two databases, their logs among them."""
    return {
        name: sum(path.stat().st_size for path in home.glob(f"{name}.db*") if not path.name.endswith("-shm"))
        for name in ("temporal", "ratchet")
    }


def _rows(database: Path) -> int:
    with sqlite3.connect(database) as opened:
        names = [name for (name,) in opened.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return sum(_count(database, f'SELECT count(*) FROM "{name}"') for name in names)


def _count(database: Path, statement: str) -> int:
    with sqlite3.connect(database) as opened:
        (count,) = opened.execute(statement).fetchone()
    return int(count)


def _model_folder(folder: Path) -> None:
    """What `open_run` wants to see of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").touch()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def report(found: Sequence[Mapping[str, float]], turns: int) -> dict[str, object]:
    """Prints the table; returns the last line."""
    print(f"{turns} turns per episode, groups of {GROUP_SIZE}; processor time in ms per episode\n")
    print(table(COLUMNS, [[row[name] for name in COLUMNS] for row in found]))
    per_episode = {str(int(row["episodes"])): round(row["cpu_ms_per_episode"], 1) for row in found}
    least, most = min(per_episode.values()), max(per_episode.values())
    sizes = [{name: round(row[name], 1) for name in COLUMNS} for row in found]
    return {"cpu_ms_per_episode": per_episode, "most_over_least": round(most / least, 2), "sizes": sizes}


def main() -> None:
    options = arguments()
    found = []
    for episodes in options.sizes:
        with own_stack(None, ("temporal",)) as stack:
            found.append(asyncio.run(measure(stack, episodes, options)))
        say(f"{episodes} episodes: {found[-1]['cpu_ms_per_episode']:.0f} CPU-ms each, {found[-1]['seconds']:.0f} s")
    finish(report(found, options.turns))
    sys.stdout.flush()
    # The SDK's threads can abort the interpreter at its normal exit.
    os._exit(0)


if __name__ == "__main__":
    main()
