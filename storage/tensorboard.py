"""A run's metrics as a TensorBoard event file: what `ratchet report` draws, for those who look at curves elsewhere.

Steps are the run's; a version's figures (evaluation, publication) stand at the step that made it. Called by the export.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from sqlmodel import Session

from storage import series
from storage.policy_age import policy_age


class Scalar(NamedTuple):
    tag: str
    value: float
    step: int
    at: float
    """Seconds since the epoch."""


def write_scalars(opened: Session, *, run: str, folder: Path) -> int:
    """Write the event file into the folder, which is made; how many points it has. Values that are not finite are
    left out."""
    # Brings torch along, which few exports are to wait for.
    from tensorboardX import SummaryWriter

    count = 0
    with SummaryWriter(logdir=str(folder)) as writer:
        for point in scalars(opened, run=run):
            if math.isfinite(point.value):
                writer.add_scalar(point.tag, point.value, point.step, walltime=point.at)
                count += 1
    return count


def scalars(opened: Session, *, run: str) -> Iterator[Scalar]:
    """Every point: the updates' metrics by their names, `time/*`, `reward/batch`, `evaluation/*`, `weight_sync/*`."""
    sizes, age = series.batch_sizes(opened, run=run), policy_age(opened, run=run)
    for batch in series.batches(opened, run=run):
        at = batch.trained_at or batch.reserved_at
        named = {name: value for name, value in batch.metrics.items() if value is not None}
        named |= {f"time/{name}": value for name, value in batch.waited.items()} | age.metrics(batch.step)
        if batch.id in sizes:
            named["reward/batch"] = sizes[batch.id].mean_reward
        for name, value in sorted(named.items()):
            yield Scalar(name, float(value), batch.step, at)
    for row in series.evaluations(opened, run=run):
        yield Scalar("evaluation/mean_reward", row.mean_reward, row.version, row.ended_at)
        for kind, value in sorted(row.by_kind.items()):
            yield Scalar(f"evaluation/by_kind/{kind}", float(value), row.version, row.ended_at)
    for item, loads in series.publications(opened, run=run):
        latency = series.publish_latency(item, loads)
        yield Scalar("weight_sync/publish_latency_s", latency, item.version, item.published_at)
        if pauses := [load.pause_s for load in loads if load.proven]:
            yield Scalar("weight_sync/pause_s", fmean(pauses), item.version, item.published_at)
