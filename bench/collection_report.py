"""What a collection's figures look like: the table, the plot, and the last line. Called by collection.py."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.batches import Collection
from bench.levers import OURS
from bench.measure import median_of, say, table

BASELINE = "baseline"
COLUMNS = {
    "s per batch": "seconds",
    "ours / baseline": "ratio",
    "tail s (last 5 %)": "tail_s",
    "lead metric s": "lead_s",
    "cache hits": "hit_rate",
    "of whole blocks": "hit_rate_blocks",
    "engine idle": "engine_idle",
    "CPU busy": "cpu_busy",
    "turns": "turns",
    "tokens": "tokens",
    "slow, in batch": "slow_share",
    "slow, admitted": "slow_admitted",
}


def report(
    rounds: Sequence[Mapping[str, Mapping[str, float]]], groups: int, group_size: int, in_flight: int, batches: int
) -> dict[str, object]:
    """Prints the table; returns the last line."""
    names = list(rounds[0])
    names = [BASELINE, OURS.name, *(name for name in names if name not in (BASELINE, OURS.name))]
    medians = {name: median_of([one[name] for one in rounds]) for name in names}
    size = groups * group_size
    print(f"{size} trajectories ({groups} groups of {group_size}), {in_flight} in flight,")
    print(f"{batches} batch(es), medians of {len(rounds)} round(s)\n")
    rows = [
        [
            name if name in (BASELINE, OURS.name) else f"ours, {name}",
            *(medians[name].get(key) for key in COLUMNS.values()),
        ]
        for name in names
    ]
    print(table(["collector", *COLUMNS], rows))
    where = {key.removeprefix("time/"): value for key, value in medians[OURS.name].items() if key.startswith("time/")}
    if where:
        print(
            f"\nwhere the time of our batch went, s: {', '.join(f'{key} {value:.2f}' for key, value in where.items())}"
        )
    return {
        "ratio": round(statistics.median(one[OURS.name]["ratio"] for one in rounds), 4),
        "seconds": {name: round(medians[name]["seconds"], 2) for name in names},
        "ratios": {name: round(medians[name]["ratio"], 4) for name in names},
        "hit_rate": {name: round(medians[name]["hit_rate"], 4) for name in names},
        "hit_rate_blocks": {name: round(medians[name]["hit_rate_blocks"], 4) for name in names},
        "engine_idle": {name: round(medians[name]["engine_idle"], 3) for name in names},
        "tail_s": {name: round(medians[name]["tail_s"], 2) for name in names},
        "trajectories": size,
        "rounds": len(rounds),
    }


def plot(path: Path, found: Mapping[str, Collection], target: int) -> None:
    """Complete groups over time, one line per collector, with the batch as a horizontal line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name, one in found.items():
        times = sorted(one.closed_s.values())
        label = name if name in (BASELINE, OURS.name) else f"ours, {name}"
        strong = {"linewidth": 2.5} if name in (BASELINE, OURS.name) else {"linewidth": 1.0, "alpha": 0.7}
        axes.step([0.0, *times], range(len(times) + 1), where="post", label=label, **strong)
    axes.axhline(target, color="grey", linestyle=":", label="a batch")
    axes.set(xlabel="seconds after admission opened", ylabel="complete groups", ylim=(0, None), xlim=(0, None))
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    say(f"plot: {path}")
