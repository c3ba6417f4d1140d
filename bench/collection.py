"""The time to a trainable batch, against a synchronous collector: `python -m bench.collection [--rounds N] [--quick]`.

Collects 256 trajectories (32 groups of 8) at fixed weights, from two real engines of the tiny policy and real
containers, on the long-tailed workload of bench/long_tail.py: first with the collector that people write
(bench/baseline.py), then with ours (bench/ours.py), then with ours and each lever of bench/levers.py off. All see the
same tasks, seeds, limits, sampling, weights and episodes in flight, and begin with empty prefix caches.

The report that this answers measures one batch of 256 trajectories at fixed weights, and so does this, from the moment
admission opens to the moment the batch is complete. One batch favours whoever may leave slow groups to the next one:
`slow_share` beside `slow_admitted` shows by how much, and `--batches B` measures B batches in a row, each with what
the last one left behind, and divides by B. A group is complete when all eight have ended validly; `lead_s` is
the product's own metric, which also wants their rewards to differ.

Needs Docker; brings up a stack of its own (about two minutes, with the policy) and takes it down. `--home` keeps its
folder. Prints a table, writes a plot (`--plot`), and ends with a line of JSON: `ratio` is seconds of ours over seconds
of the baseline, the median of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiodocker
from temporalio.client import Client

from activities.generation.engine import EngineClient
from activities.generation.transcript import Template
from activities.sandbox import image
from activities.sandbox.daemon import Daemon
from bench import ours
from bench.baseline import Collected, SynchronousCollector, leftovers
from bench.batches import Collection, EpisodeUse, TurnUse, figures
from bench.collection_report import BASELINE, plot, report
from bench.idle import Idle
from bench.levers import LEVERS, OURS, Lever, chosen
from bench.long_tail import TAIL, Tail, load_of, paced_layer, write_folder
from bench.measure import finish, say
from bench.own_stack import PROJECT, OwnStack, free_ports, own_stack
from tasksets import open_taskset, pick
from workers import parts
from workers.temporal import connect
from workflows.config import parse_run_config
from workflows.contracts import Split, TaskRef

PARTS = ("temporal", "s3", "docker", "prepare", "vllm", "control", "trainer", "engines")
ENGINES = 2
LIMIT_S = 3600.0
QUICK_PACE_S = 2.0


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the medians are given")
    parser.add_argument("--groups", type=int, default=32, help="groups of a batch")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--batches", type=int, default=1, help="batches in a row, at most 6")
    parser.add_argument("--in-flight", type=int, help="most episodes at once, of either; default: a batch of them")
    parser.add_argument("--pace", type=float, help=f"seconds of a command, the median over tasks ({TAIL.median_s:g})")
    parser.add_argument("--sigma", type=float, default=TAIL.sigma, help="standard deviation of the seconds' logarithm")
    parser.add_argument("--levers", default="all", help=f"all, none, or: {', '.join(item.name for item in LEVERS)}")
    parser.add_argument("--seed", type=int, default=0, help="of the workload; each round samples anew")
    parser.add_argument("--home", type=Path, help="the stack's folder, kept afterwards with the policy in it")
    parser.add_argument("--plot", type=Path, default=Path("collection.png"), help="file of the plot, .png or .svg")
    parser.add_argument("--quick", action="store_true", help="one round of 8 groups of 4, no levers: 3 minutes")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.groups, options.group_size, options.levers = 1, 8, 4, "none"
    options.in_flight = options.in_flight or options.groups * options.group_size
    options.pace = options.pace or (QUICK_PACE_S if options.quick else TAIL.median_s)
    options.tail = Tail(options.pace, options.sigma)
    options.levers = list(chosen(options.levers))
    return options


def run_config(options: argparse.Namespace, model: Path, taskset: Path, seed: int) -> dict[str, Any]:
    """run.json of a run that collects the batches as one and makes no further step."""
    return {
        "model": str(model),
        "taskset": str(taskset),
        "seed": seed,
        "mode": "async",
        "max_concurrent_episodes": options.in_flight,
        "rollout": {
            "group_size": options.group_size,
            "groups_per_batch": options.groups * options.batches,
            "max_turns": 8,
            "max_tokens_per_turn": 40,
            "max_tokens": 256,
            "context_length": 512,
            "step_timeout_s": options.tail.longest_s + 60,
            "time_budget_s": 3600,
            "max_output_chars": 300,
            "malformed_reminders": 5,
            "refill": 16,
            "temperature": 0.8,
        },
        "training": {"steps": 1, "learning_rate": 1e-9},
        "evaluation": {"tasks": 0},
    }


class Bench:
    """Both collectors over one stack. `model` and `taskset` are folders."""

    def __init__(self, stack: OwnStack, options: argparse.Namespace, model: Path, taskset: Path, docker: str) -> None:
        self._stack, self._options = stack, options
        self._model, self._taskset, self._docker = model, taskset, docker
        self._settings = stack.settings()
        self._database = parts.database(self._settings)
        self._engines = [EngineClient(info) for info in self._settings.engine_infos]
        self._urls = [info.url for info in self._settings.engine_infos]

    def config(self, seed: int) -> dict[str, Any]:
        return run_config(self._options, self._model, self._taskset, seed)

    def task_of(self, number: int, seed: int) -> TaskRef:
        """The task of a group, in the order that a run with this seed takes them."""
        return pick(open_taskset(str(self._taskset)), Split.TRAIN, seed, number, 1)[0]

    async def warm_up(self, client: Client) -> None:
        """Engines that serve the policy, with weights that stay."""
        run = f"bench-warm-up-{int(time.time())}"
        config = self.config(0)
        config["rollout"] |= {"groups_per_batch": 2, "group_size": 2}
        with self._stack.worker("rollout"):
            await ours.start(client, run, config)
            await ours.wait_for_batch(client, self._database, run, LIMIT_S)
            await ours.cancel(client, run)

    async def baseline(self, seed: int) -> Collection:
        """The synchronous collector's batches."""
        options, limits = self._options, parse_run_config(self.config(seed)).rollout.limits()
        state = self._stack.home / "baseline"
        await self._empty_caches()
        async with aiodocker.Docker(url=self._docker or None) as docker:
            for container in await leftovers(docker, state):
                await container.delete(force=True)
            collector = SynchronousCollector(
                self._engines,
                docker,
                Template.load(str(self._model)),
                open_taskset(str(self._taskset)),
                limits,
                state=state,
                most=options.in_flight,
            )
            idle, taken = Idle(self._urls), list[Collected]()
            async with idle.sampled():
                for index in range(options.batches):
                    first = index * options.groups
                    tasks = [self.task_of(first + offset, seed) for offset in range(options.groups)]
                    taken.append(await collector.batch(tasks, first=first, group_size=options.group_size, seed=seed))
        return _of_baseline(taken, idle)

    async def ours(self, client: Client, lever: Lever, seed: int, round_robin: str) -> Collection:
        """Our batches with the lever as it says."""
        run = f"bench-{lever.name.replace(' ', '-')}-{seed}-{int(time.time())}"
        extra = {**lever.environment(round_robin)}
        idle = Idle(self._urls)
        with self._stack.worker("rollout", extra):
            await ours.start(client, run, lever.applied(self.config(seed)))
            await ours.wait_for_admission(self._database, run, LIMIT_S)
            async with idle.sampled():
                await ours.wait_for_batch(client, self._database, run, LIMIT_S)
            await ours.cancel(client, run)
        return ours.collected(self._database, run, idle, by_number=lever.by_number)

    async def _empty_caches(self) -> None:
        """As the application of a run's weights leaves them."""
        for engine in self._engines:
            await engine.pause()
            await engine.resume()

    async def round(self, client: Client, number: int, round_robin: str) -> dict[str, Collection]:
        """One measurement of everything; the order changes from round to round."""
        # TrainingRun's groups and the baseline's take tasks and seeds from the same number.
        seed = self._options.seed + number
        order: list[Lever | None] = [None, OURS, *self._options.levers]
        shift = number % len(order)
        found: dict[str, Collection] = {}
        for lever in order[shift:] + order[:shift]:
            name = lever.name if lever else BASELINE
            began = time.monotonic()
            found[name] = await (self.ours(client, lever, seed, round_robin) if lever else self.baseline(seed))
            say(f"round {number + 1}: {name}: done in {time.monotonic() - began:.0f} s")
        return found

    def figures(self, found: Mapping[str, Collection], number: int) -> dict[str, dict[str, float]]:
        """The compared figures of one round, by who collected."""
        options, seed = self._options, self._options.seed + number

        def slow(group: int) -> bool:
            return load_of(self.task_of(group, seed).task_id, options.seed, options.tail).slow

        values = {name: figures(one, options.groups, options.batches, slow) for name, one in found.items()}
        for one in values.values():
            one["ratio"] = one["seconds"] / values[BASELINE]["seconds"]
        return values


def _of_baseline(taken: Sequence[Collected], idle: Idle) -> Collection:
    """Batches one after the other on one clock."""
    closed: dict[int, float] = {}
    episodes: list[EpisodeUse] = []
    elapsed = 0.0
    for batch in taken:
        closed |= {number: elapsed + seconds for number, seconds in batch.closed_s.items()}
        for played in batch.episodes:
            turns = [TurnUse(turn.prefix, turn.cached, turn.sampled) for turn in played.turns]
            episodes.append(EpisodeUse(played.group, elapsed + played.ended_s, turns))
        elapsed += batch.seconds
    return Collection(
        closed_s=closed,
        episodes=episodes,
        idle=idle.share,
        cpu_busy=idle.cpu_busy,
        by_number=True,
        began=len(closed),
    )


# --- the whole ----------------------------------------------------------------------------------------------------


@contextmanager
def round_robin(urls: Sequence[str], env: Mapping[str, str]) -> Iterator[str]:
    """The router of the lever, for the time of the block; its address."""
    (port,) = free_ports(0, 1)
    command = [sys.executable, "-m", "bench.round_robin", "--port", str(port), *urls]
    process = subprocess.Popen(command, cwd=PROJECT, env=dict(env))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


async def load_image(docker: str) -> str:
    """The id of the workload's image, which the daemon has afterwards."""
    layer = paced_layer()
    image.BASES[layer.name] = lambda: layer
    daemon = Daemon(docker)
    try:
        return await image.ensure_image(daemon, layer.name)
    finally:
        await daemon.close()


def policy(stack: OwnStack) -> Path:
    """The tiny policy's folder, made unless the stack's folder has it."""
    say("the tiny policy, about a minute where it is not there")
    stack.run("ratchet", "bootstrap", "tiny")
    return stack.home / "models" / "tiny"


async def measure(stack: OwnStack, options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Collection]]:
    """The figures of each round, and the last round's collections for the plot."""
    docker = stack.settings().docker_host
    taskset = write_folder(stack.home / "long-tail", await load_image(docker), options.seed, options.tail)
    bench = Bench(stack, options, policy(stack), taskset, docker)
    client = await connect(stack.settings(), role="bench")
    await bench.warm_up(client)
    rows, found = [], dict[str, Collection]()
    with round_robin([info.url for info in stack.settings().engine_infos], stack.env) as router:
        for number in range(options.rounds):
            found = await bench.round(client, number, router)
            rows.append(bench.figures(found, number))
            for name, one in rows[-1].items():
                say(f"round {number + 1}: {name}: {one['seconds']:.1f} s a batch")
    return rows, found


def main() -> None:
    options = arguments()
    for lever in [lever for lever in options.levers if lever.missing()]:
        say(f"passed over: {lever.name} ({lever.meaning}): this build has no {', '.join(lever.missing())}")
        options.levers.remove(lever)
    extra = {"RATCHET_SANDBOX_SLOTS": str(options.in_flight + options.group_size)}
    with own_stack(options.home, PARTS, engines=ENGINES, extra=extra) as stack:
        rows, found = asyncio.run(measure(stack, options))
    plot(options.plot, found, options.groups * options.batches)
    finish(report(rows, options.groups, options.group_size, options.in_flight, options.batches))
    # The SDK's threads can abort the interpreter at its normal exit.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
