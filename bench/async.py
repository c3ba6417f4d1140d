"""Wall time to equal reward, sync against async: `python -m bench.async [--seeds N] [--quick]`.

Trains the tiny policy on the long-tailed workload of bench/long_tail.py, on one real stack: once in mode sync, then in
mode async with max_off_policy_steps 1, 2 and 4, and all of that for each seed. The same policy, tasks, batch and
optimizer; what differs is whether generation waits for the slowest group and for the trainer. An asynchronous run may
make half as many updates again, since what is compared is time; it is ended once it is as good as sync was.

The reward that is to be reached is the best that sync had (smoothed over three versions, about 200 episodes); a mode's
time is from the publication of version 0 until its own smoothed reward is as high. `ratio` of the last line is async's
over sync's: the median over the seeds, of the best lag. A mode that never gets there has no time, and counts as
infinitely long.

Needs Docker; brings up a stack of its own and takes it down. `--home` keeps its folder. With `--save FILE` each run's
curve goes into the file as the run ends, and what the file has is not measured again: seeds can be measured one at a
time, and a command that was ended goes on where it was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import ours
from bench.collection import load_image, policy
from bench.long_tail import Tail, write_folder
from bench.measure import finish, median_of, say, table
from bench.own_stack import OwnStack, own_stack
from bench.reward_curves import Point, best, curve_of, metrics_of, seconds_to, smoothed
from workers import parts
from workers.temporal import connect

SYNC = "sync"
IN_FLIGHT = 64
"""Episodes: a batch of them."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds, of which the median is given")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them, to measure one at a time")
    parser.add_argument("--steps", type=int, default=12, help="updates of the synchronous run")
    parser.add_argument("--lags", default="1,2,4", help="max_off_policy_steps of the asynchronous runs")
    parser.add_argument("--pace", type=float, default=4.0, help="seconds that a command of the median task takes")
    parser.add_argument("--save", type=Path, help="file of what was measured, to go on from")
    parser.add_argument("--home", type=Path, help="the stack's folder, kept afterwards with the policy in it")
    parser.add_argument("--plot", type=Path, default=Path("async.png"), help="file of the plot, .png or .svg")
    parser.add_argument("--quick", action="store_true", help="one seed, 4 updates, lag 1: shows that it works")
    options = parser.parse_args(argv)
    if options.quick:
        options.seeds, options.steps, options.lags = 1, 4, "1"
    options.lags = [int(item) for item in options.lags.split(",")]
    return options


def run_config(
    options: argparse.Namespace, model: Path, taskset: Path, *, seed: int, lag: int | None
) -> dict[str, Any]:
    """run.json of one run; `lag` None: mode sync."""
    steps = options.steps if lag is None else math.ceil(1.5 * options.steps)
    return {
        "model": str(model),
        "taskset": str(taskset),
        "seed": seed,
        "mode": "sync" if lag is None else "async",
        "max_concurrent_episodes": IN_FLIGHT,
        "rollout": {
            "group_size": 8,
            "groups_per_batch": 8,
            "max_turns": 8,
            "max_tokens_per_turn": 40,
            "max_tokens": 256,
            "context_length": 512,
            "step_timeout_s": 120,
            "time_budget_s": 900,
            "max_output_chars": 300,
            "max_off_policy_steps": 1 if lag is None else lag,
            "refill": 1.5,
            "temperature": 0.8,
        },
        "training": {"steps": steps, "learning_rate": 0.0006, "warmup_steps": 1, "minibatches": 4},
        "evaluation": {"tasks": 0},
    }


def name_of(lag: int | None) -> str:
    return SYNC if lag is None else f"async {lag}"


Curves = dict[str, list[Point]]
Figures = dict[str, dict[str, float]]


class Measured:
    """Curves and figures by seed and mode; in a file, where there is one. Raises SystemExit for a file of other
    options."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._path: Path | None = options.save
        self._options = {"steps": options.steps, "pace": options.pace}
        self.curves: dict[int, Curves] = {}
        self.figures: dict[int, Figures] = {}
        if self._path is None or not self._path.exists():
            return
        saved = json.loads(self._path.read_text())
        if saved["options"] != self._options:
            raise SystemExit(f"{self._path} has runs of {saved['options']}, not of {self._options}: name another file")
        for run in saved["runs"]:
            self.add(run["seed"], run["mode"], [Point(**point) for point in run["curve"]], run["figures"])

    def has(self, seed: int, mode: str) -> bool:
        return mode in self.curves.get(seed, {})

    def add(self, seed: int, mode: str, curve: list[Point], figures: dict[str, float]) -> None:
        self.curves.setdefault(seed, {})[mode] = curve
        self.figures.setdefault(seed, {})[mode] = figures

    def save(self) -> None:
        if self._path is None:
            return
        runs = [
            {
                "seed": seed,
                "mode": mode,
                "figures": self.figures[seed][mode],
                "curve": [asdict(point) for point in curve],
            }
            for seed, modes in self.curves.items()
            for mode, curve in modes.items()
        ]
        partial = self._path.with_suffix(".part")
        partial.write_text(json.dumps({"options": self._options, "runs": runs}, indent=1) + "\n")
        partial.replace(self._path)


async def measure(stack: OwnStack, options: argparse.Namespace, measured: Measured) -> None:
    """Adds the runs that are not in `measured` yet."""
    settings = stack.settings()
    image_id = await load_image(settings.docker_host)
    taskset = write_folder(stack.home / "long-tail", image_id, 0, Tail(median_s=options.pace))
    model, database = policy(stack), parts.database(settings)
    client = await connect(settings, role="bench")
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for lag in (None, *options.lags):
            name, began = name_of(lag), time.monotonic()
            if measured.has(seed, name):
                continue
            run = f"bench-{name.replace(' ', '-')}-{seed}-{int(time.time())}"
            config = run_config(options, model, taskset, seed=seed, lag=lag)
            if lag is None:
                await ours.train(client, run, config)
            else:
                target, behind = best(measured.curves[seed][SYNC]), lag
                await ours.train(
                    client,
                    run,
                    config,
                    until=lambda: seconds_to(curve_of(database, run, lag=behind), target) is not None,  # noqa: B023
                )
            measured.add(seed, name, curve_of(database, run, lag=lag or 0), metrics_of(database, run))
            measured.save()
            reached = best(measured.curves[seed][name])
            say(f"seed {seed}: {name}: best reward {reached:.3f}, {time.monotonic() - began:.0f} s")


def compared(curves: Curves, figures: Figures) -> Figures:
    """The figures of one seed, by mode."""
    target = best(curves[SYNC])
    sync_s = seconds_to(curves[SYNC], target) or math.nan
    found: Figures = {}
    for name, curve in curves.items():
        reached = seconds_to(curve, target)
        seconds = math.inf if reached is None else reached
        found[name] = {**figures[name], "target": target, "best": best(curve), "seconds": seconds}
        found[name]["ratio"] = seconds / sync_s
    return found


COLUMNS = {
    "s to sync's best": "seconds",
    "of sync": "ratio",
    "best reward": "best",
    "s per step": "seconds_per_step",
    "lag of tokens": "lag",
    "divergence": "divergence",
    "mismatch_kl": "mismatch_kl",
    "groups dropped": "dropped",
}


def report(seeds: Sequence[Mapping[str, Mapping[str, float]]], first_seed: int = 0) -> dict[str, object]:
    """Prints the tables; returns the last line."""
    names = list(seeds[0])
    medians = {name: median_of([one[name] for one in seeds]) for name in names}
    print(f"medians of {len(seeds)} seed(s)\n")
    print(table(["mode", *COLUMNS], [[name, *(medians[name].get(key) for key in COLUMNS.values())] for name in names]))
    print("\ntime to sync's best reward over sync's own, by seed\n")
    print(
        table(
            ["seed", *names],
            [[number, *(one[name]["ratio"] for name in names)] for number, one in enumerate(seeds, first_seed)],
        )
    )
    asynchronous = [name for name in names if name != SYNC]
    ratios = {name: statistics.median(one[name]["ratio"] for one in seeds) for name in asynchronous}
    chosen = min(ratios, key=lambda name: ratios[name])
    return {
        "ratio": _finite(ratios[chosen]),
        "mode": chosen,
        "ratios": {name: _finite(value) for name, value in ratios.items()},
        "by_seed": [{name: _finite(one[name]["ratio"]) for name in asynchronous} for one in seeds],
        "target": [round(one[SYNC]["target"], 4) for one in seeds],
        "best": {name: round(medians[name]["best"], 4) for name in names},
        "seeds": len(seeds),
    }


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def plot(path: Path, curves: Sequence[Curves]) -> None:
    """Smoothed reward over wall time: a colour per mode, a line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for number, name in enumerate(curves[0]):
        for seed, one in enumerate(curves):
            points = smoothed(one[name])
            label = name if seed == 0 else None
            axes.plot([x for x, _ in points], [y for _, y in points], color=f"C{number}", alpha=0.8, label=label)
    axes.set(xlabel="seconds after version 0", ylabel="reward of new episodes", xlim=(0, None), ylim=(0, 1))
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    say(f"plot: {path}")


def main() -> None:
    options = arguments()
    measured = Measured(options)
    wanted = range(options.first_seed, options.first_seed + options.seeds)
    if not all(measured.has(seed, name_of(lag)) for seed in wanted for lag in (None, *options.lags)):
        extra = {"RATCHET_SANDBOX_SLOTS": str(IN_FLIGHT + 8)}
        with own_stack(options.home, ours.PARTS, engines=1, extra=extra) as stack:
            asyncio.run(measure(stack, options, measured))
    plot(options.plot, [measured.curves[seed] for seed in wanted])
    seeds = [compared(measured.curves[seed], measured.figures[seed]) for seed in wanted]
    finish(report(seeds, options.first_seed))
    # The SDK's threads can abort the interpreter at its normal exit.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
