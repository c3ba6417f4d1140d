"""Several runs side by side: the figures that a person weighs against each other, and where their configurations part.

Built from the runs' reports. Called by `ratchet compare`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from sqlmodel import Session

from storage import queries, series
from storage.printable import one_line
from storage.report import words
from storage.report.build import build_report
from storage.report.limits import Limits
from storage.report.model import TIME_PARTS, Report
from storage.report.parts import Part
from storage.tables import Batch
from workflows.config import RunConfig
from workflows.contracts import EpisodeKind

LAST_BATCHES = 5


class ComparedPart(Part):
    """One run. Seconds, shares (0 to 1) and counts; None where there is nothing to say."""

    run: str
    state: str
    reason: str
    steps: int
    steps_planned: int
    evaluation_first: float | None
    evaluation_last: float | None
    reward_last_batches: float | None
    """Mean over the last 5 batches."""
    seconds: float
    seconds_per_step: float | None
    """Between the first and the last update, so without the start."""
    time_to_trainable_batch_s: float | None
    tail_s: float | None
    time_parts_s: dict[str, float]
    episodes: int
    """Training attempts."""
    infra_share: float | None
    sampled_tokens: int
    cache_hit_share: float | None
    off_policy_steps: float | None
    divergence: float | None
    mismatch_kl: float | None
    groups_trained: int
    groups_closed: int
    publish_latency_s: float | None
    pause_s: float | None
    not_ready: list[str]
    """Topics of `ratchet report` that are not ready."""


class ComparisonPart(Part):
    runs: list[ComparedPart]
    config: dict[str, list[Any]]
    """Fields of the configuration in which the runs differ, by name; values in the order of the runs."""


def compare(opened: Session, runs: Sequence[str], limits: Limits | None = None) -> ComparisonPart:
    """Raises NotFound naming the runs that exist."""
    reports = [build_report(opened, run, limits) for run in runs]
    fields = [_flat(RunConfig.model_validate(queries.run_row(opened, run=run).config)) for run in runs]
    names = sorted({name for one in fields for name in one})
    columns = {name: [one.get(name) for one in fields] for name in names}
    return ComparisonPart(
        runs=[_compared(opened, report) for report in reports],
        config={name: values for name, values in columns.items() if any(value != values[0] for value in values)},
    )


def _flat(config: RunConfig) -> dict[str, Any]:
    """`rollout.group_size` and the like; what is a mapping itself (`training.deepspeed`) stays one value."""
    found: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json").items():
        section = hasattr(getattr(config, name), "model_dump")
        found |= {f"{name}.{inner}": item for inner, item in value.items()} if section else {name: value}
    return found


def _compared(opened: Session, report: Report) -> ComparedPart:
    means, rewards = report.summary, [step.reward for step in report.steps[-LAST_BATCHES:]]
    shared = set(ComparedPart.model_fields) & set(type(means).model_fields)
    return ComparedPart(
        run=report.run,
        state=report.state,
        reason=report.reason,
        steps=report.step,
        steps_planned=report.steps_planned,
        evaluation_first=report.evaluation.first,
        evaluation_last=report.evaluation.last,
        reward_last_batches=fmean(rewards) if rewards else None,
        seconds=report.seconds,
        seconds_per_step=_seconds_per_step(series.batches(opened, run=report.run)),
        episodes=sum(report.outcomes.get(EpisodeKind.TRAIN, {}).values()),
        groups_trained=report.groups.trained,
        groups_closed=report.groups.closed,
        not_ready=[item.topic for item in report.readiness if item.verdict == "not ready"],
        **means.model_dump(include=shared),
    )


def _seconds_per_step(batches: list[Batch]) -> float | None:
    ended = sorted(batch.trained_at for batch in batches if batch.trained_at is not None)
    return (ended[-1] - ended[0]) / (len(ended) - 1) if len(ended) > 1 else None


Cell = Callable[[ComparedPart], str]

ROWS: dict[str, Cell] = {
    "state": lambda one: one.state + (f": {one_line(one.reason)}" if one.reason else ""),
    "not ready": lambda one: ", ".join(one.not_ready) or words.NONE,
    "steps": lambda one: f"{one.steps} of {one.steps_planned}",
    "held-out reward, first": lambda one: words.reward(one.evaluation_first),
    "held-out reward, last": lambda one: words.reward(one.evaluation_last),
    f"reward, last {LAST_BATCHES} batches": lambda one: words.reward(one.reward_last_batches),
    "time, all told": lambda one: words.seconds(one.seconds),
    "time per step": lambda one: words.seconds(one.seconds_per_step),
    "time to trainable batch": lambda one: words.seconds(one.time_to_trainable_batch_s),
    "of it for the last 5 %": lambda one: words.seconds(one.tail_s),
}
MORE: dict[str, Cell] = {
    "episodes": lambda one: str(one.episodes),
    "failures that were ours": lambda one: words.share(one.infra_share),
    "groups trained": lambda one: f"{one.groups_trained} of {one.groups_closed}",
    "tokens sampled": lambda one: words.thousands(one.sampled_tokens),
    "prompt tokens from cache": lambda one: words.share(one.cache_hit_share),
    "off-policy steps": lambda one: words.small(one.off_policy_steps),
    "divergence": lambda one: words.small(one.divergence),
    "mismatch_kl": lambda one: words.small(one.mismatch_kl),
    "publish latency": lambda one: words.seconds(one.publish_latency_s),
    "pause of an engine": lambda one: words.seconds(one.pause_s),
}


def render_comparison(part: ComparisonPart, console: Console) -> None:
    """Print the figures, and the fields of the configuration that differ."""
    table = _table("", *(one.run for one in part.runs))
    for name, cell in ROWS.items():
        table.add_row(name, *(Text(cell(one)) for one in part.runs))
    for name in TIME_PARTS:
        if any(name in one.time_parts_s for one in part.runs):
            spent = (words.seconds(one.time_parts_s.get(name)) for one in part.runs)
            table.add_row(f"  {words.plain(name)}, mean", *spent)
    for name, cell in MORE.items():
        table.add_row(name, *(Text(cell(one)) for one in part.runs))
    console.print(table)
    if not part.config:
        console.print("the configurations are the same", markup=False)
        return
    table = _table("configuration", *(one.run for one in part.runs))
    for name, values in part.config.items():
        table.add_row(name, *(Text(one_line(_value(value))) for value in values))
    console.print(table)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _table(head: str, *runs: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(head, no_wrap=True)
    for run in runs:
        table.add_column(Text(run), overflow="fold")
    return table
