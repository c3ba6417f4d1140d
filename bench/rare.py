"""What replaying rare successes brings: `python -m bench.rare [--seeds N] [--quick]`.

Trains the tiny policy, sampled so hot that it solves a task in a few of a hundred attempts, on a small set of tasks of
the taskset `shell`, which therefore come round: once with `training.replay_share` 0, once with it on; for each seed.
Everything else is the same. Shown are the reward of new episodes (smoothed over three versions, replayed ones never
among them), how many groups gave a batch something to learn from, and how many archived successes were used. `ratio` of
the last line is the final reward with replay over the one without, the median over the seeds.

Needs Docker; brings up a stack of its own and takes it down. `--home` keeps its folder.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from sqlmodel import col, func, select

from activities.sandbox import image
from activities.sandbox.daemon import Daemon
from bench import ours
from bench.collection import policy
from bench.measure import finish, median_of, say, table
from bench.own_stack import OwnStack, own_stack
from bench.reward_curves import best, curve_of, smoothed
from storage.database import session
from storage.tables import Batch, BatchMember, Replay
from tasksets.shell import KINDS, ShellTaskset
from workers import parts
from workers.temporal import connect

MODES = {"without": 0.0, "with replay": 0.1}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds, of which the median is given")
    parser.add_argument("--steps", type=int, default=12, help="updates of each run")
    parser.add_argument("--tasks", type=int, default=24, help="tasks of the set")
    parser.add_argument("--temperature", type=float, default=1.3, help="the hotter, the rarer a success")
    parser.add_argument("--home", type=Path, help="the stack's folder, kept afterwards with the policy in it")
    parser.add_argument("--quick", action="store_true", help="one seed, 4 updates: shows that it works")
    options = parser.parse_args(argv)
    if options.quick:
        options.seeds, options.steps = 1, 4
    return options


def write_tasks(folder: Path, image_id: str, count: int) -> Path:
    """A native folder with the first tasks of each kind; returns it."""
    train, taskset = folder / "train", ShellTaskset()
    train.mkdir(parents=True, exist_ok=True)
    names = [f"{kind}-{number:04d}" for number in range(count) for kind in KINDS][:count]
    for name in names:
        task = taskset.load(name).model_copy(update={"image": image_id})
        (train / f"{name}.json").write_text(task.model_dump_json(exclude={"id"}, exclude_defaults=True) + "\n")
    return folder


def run_config(options: argparse.Namespace, model: Path, taskset: Path, *, seed: int, share: float) -> dict[str, Any]:
    return {
        "model": str(model),
        "taskset": str(taskset),
        "seed": seed,
        "mode": "async",
        "max_concurrent_episodes": 32,
        "rollout": {
            "group_size": 8,
            "groups_per_batch": 4,
            "max_turns": 4,
            "max_tokens_per_turn": 32,
            "max_tokens": 128,
            "context_length": 384,
            "step_timeout_s": 5,
            "time_budget_s": 15,
            "max_output_chars": 300,
            "refill": 3,
            "temperature": options.temperature,
        },
        "training": {
            "steps": options.steps,
            "learning_rate": 0.0006,
            "warmup_steps": 1,
            "minibatches": 2,
            "replay_share": share,
        },
        "evaluation": {"tasks": 0},
    }


def figures(database: Engine, run: str) -> dict[str, float]:
    """What the run's rows say."""
    curve = curve_of(database, run, lag=1)
    with session(database) as opened:
        batches = select(Batch.id).where(Batch.run == run, col(Batch.trained_at).is_not(None))
        steps = len(opened.exec(batches).all())
        groups = opened.exec(
            select(func.count(func.distinct(BatchMember.group_id))).where(col(BatchMember.batch).in_(batches))
        ).one()
        replays = opened.exec(select(func.count()).select_from(Replay).where(col(Replay.batch).in_(batches))).one()
    values = smoothed(curve)
    return {
        "first": curve[0].reward if curve else 0.0,
        "final": values[-1][1] if values else 0.0,
        "best": best(curve),
        "groups_per_step": groups / max(1, steps),
        "replays": float(replays),
        "seconds": curve[-1].seconds if curve else 0.0,
    }


async def measure(stack: OwnStack, options: argparse.Namespace) -> list[dict[str, dict[str, float]]]:
    """By seed and mode."""
    settings = stack.settings()
    daemon = Daemon(settings.docker_host)
    try:
        image_id = await image.ensure_image(daemon, "busybox")
    finally:
        await daemon.close()
    taskset, model = write_tasks(stack.home / "rare", image_id, options.tasks), policy(stack)
    database, client = parts.database(settings), await connect(settings, role="bench")
    found: list[dict[str, dict[str, float]]] = []
    for seed in range(options.seeds):
        found.append({})
        for name, share in MODES.items():
            run = f"bench-{name.replace(' ', '-')}-{seed}-{int(time.time())}"
            await ours.train(client, run, run_config(options, model, taskset, seed=seed, share=share))
            found[-1][name] = figures(database, run)
            made = found[-1][name]
            say(f"seed {seed}: {name}: {made['first']:.3f} -> {made['final']:.3f}, {made['replays']:.0f} replays")
    return found


COLUMNS = {
    "reward at first": "first",
    "at last": "final",
    "best": "best",
    "groups per step": "groups_per_step",
    "successes replayed": "replays",
    "seconds": "seconds",
}


def report(seeds: Sequence[dict[str, dict[str, float]]]) -> dict[str, object]:
    """Prints the table; returns the last line."""
    names = list(MODES)
    medians = {name: median_of([one[name] for one in seeds]) for name in names}
    print(f"medians of {len(seeds)} seed(s)\n")
    print(table(["replay", *COLUMNS], [[name, *(medians[name][key] for key in COLUMNS.values())] for name in names]))
    off, on = names
    ratios = [one[on]["final"] / one[off]["final"] if one[off]["final"] else float("inf") for one in seeds]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "final": {name: round(medians[name]["final"], 4) for name in names},
        "by_seed": [{name: round(one[name]["final"], 4) for name in names} for one in seeds],
        "replays": {name: medians[name]["replays"] for name in names},
        "seeds": len(seeds),
    }


def main() -> None:
    options = arguments()
    with own_stack(options.home, ours.PARTS, engines=1) as stack:
        found = asyncio.run(measure(stack, options))
    finish(report(found))
    # The SDK's threads can abort the interpreter at its normal exit.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
