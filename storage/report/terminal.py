"""A report in a terminal: the headline figures, the reward curve, and the tables behind them."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from storage.report import words
from storage.report.model import TIME_PARTS, Report

PLOT_HEIGHT = 9
PLOT_WIDTH = 60
LAST_STEPS = 12
LAST_VERSIONS = 6
SHORT = {"generate": "gen", "wait_for_siblings": "siblings", "wait_for_batch": "pool"}
"""Heads of columns that are narrower than the names of their parts."""


def render_terminal(report: Report, console: Console) -> None:
    """Print the report to the console."""
    _headline(report, console)
    if curve := reward_plot(report):
        console.print(Text(curve))
    for table in (_steps(report), _endings(report), _kinds(report), _failures(report), _publications(report)):
        if table.row_count:
            console.print(table)


def _headline(report: Report, console: Console) -> None:
    console.print(Text(f"run {report.run}", style="bold") + Text(f"  {report.state}"), Text(report.reason), sep="  ")
    means, small = report.summary, words.small
    lines = {
        "policy": f"{report.model} on {report.taskset}, {report.mode}, seed {report.seed}",
        "steps": f"{report.step} of {report.steps_planned} in {words.seconds(report.seconds)}",
        "held-out reward": _held_out(report),
        "time to trainable batch": words.seconds(means.time_to_trainable_batch_s),
        "failures that were ours": words.share(means.infra_share),
        "off-policy steps": f"mean {small(means.off_policy_steps)}, most {small(means.off_policy_steps_max)}",
        "mismatch_kl": f"mean {small(means.mismatch_kl)}, most {small(means.mismatch_kl_max)}",
        "weight sync": f"publish {words.seconds(means.publish_latency_s)}, pause {words.seconds(means.pause_s)}",
        "tokens": f"{words.thousands(means.sampled_tokens)} sampled, "
        f"{words.share(means.cache_hit_share)} of prompt tokens from cache",
        "groups": f"{report.groups.closed} closed, {report.groups.trained} trained"
        + "".join(f", {count} {words.plain(reason)}" for reason, count in report.groups.dropped.items()),
    }
    for name, value in lines.items():
        console.print(Text(f"  {name:<24}", style="dim") + Text(value))


def _held_out(report: Report) -> str:
    points = report.evaluation.versions
    if not points:
        return words.NONE
    first = f"{words.reward(points[0].mean_reward)} (version {points[0].version}, {points[0].episodes} episodes)"
    if len(points) == 1:
        return first
    return f"{first} -> {words.reward(points[-1].mean_reward)} (version {points[-1].version})"


def reward_plot(report: Report) -> str:
    """The rewards over steps as text: `·` mean of a step's batch, `◆` held-out tasks. Empty without a step."""
    batches = [(step.step, step.reward) for step in report.steps]
    held_out = [(point.version, point.mean_reward) for point in report.evaluation.versions]
    if not batches:
        return ""
    every = [value for _, value in batches + held_out]
    low, high = min(0.0, *every), max(1.0, *every)
    last = max(1, *(x for x, _ in batches + held_out))
    rows = [[" "] * (PLOT_WIDTH + 1) for _ in range(PLOT_HEIGHT)]
    for points, mark in ((batches, "·"), (held_out, "◆")):
        for x, value in points:
            line = round((high - value) / (high - low) * (PLOT_HEIGHT - 1))
            rows[line][round(x / last * PLOT_WIDTH)] = mark
    labels = {0: high, PLOT_HEIGHT // 2: (high + low) / 2, PLOT_HEIGHT - 1: low}
    lines = [
        f"  {labels[index]:6.2f} ┤{''.join(row)}" if index in labels else f"         │{''.join(row)}"
        for index, row in enumerate(rows)
    ]
    axis = f"         └{'─' * (PLOT_WIDTH + 1)}\n          0{'step':^{PLOT_WIDTH - 1 - len(str(last))}}{last}"
    return "\n".join(["", *lines, axis, "          · mean reward of the batch   ◆ held-out tasks", ""])


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _steps(report: Report) -> Table:
    names = [name for name in TIME_PARTS if any(name in step.time for step in report.steps)]
    title = "Steps" if len(report.steps) <= LAST_STEPS else f"Last {LAST_STEPS} of {len(report.steps)} steps"
    heads = ("step", "reward", "episodes", "total", *(SHORT.get(name, name) for name in names), "age", "mismatch")
    table = _table(f"{title}; seconds from batch to batch, and means of its episodes", *heads)
    for step in report.steps[-LAST_STEPS:]:
        spent = [step.time.get(name) for name in ("to_trainable_batch", *names)]
        table.add_row(
            str(step.step),
            words.reward(step.reward),
            str(step.episodes),
            *map(words.bare_seconds, spent),
            words.small(step.metrics.get("off_policy/steps")),
            words.small(step.metrics.get("mismatch_kl/mean")),
        )
    return table


def _endings(report: Report) -> Table:
    table = _table("How attempts ended", "", "train", "evaluation")
    for heading, counts in (("outcome", report.outcomes), ("stop reason", report.stop_reasons)):
        totals = {use: sum(values.values()) for use, values in counts.items()}
        names = dict.fromkeys(name for values in counts.values() for name in values)
        for name in names:
            shares = [_count(counts.get(use, {}).get(name, 0), totals.get(use, 0)) for use in ("train", "evaluation")]
            table.add_row(f"{heading}: {words.plain(name)}", *shares)
    return table


def _count(count: int, total: int) -> str:
    return f"{count} ({words.share(count / total)})" if count else words.NONE


def _kinds(report: Report) -> Table:
    table = _table("Kinds of task", "use", "kind", "episodes", "valid", "mean reward")
    for item in report.kinds:
        row = (item.use, item.kind, str(item.episodes), str(item.valid), words.reward(item.mean_reward))
        table.add_row(*row)
    return table


def _failures(report: Report) -> Table:
    table = Table(
        title="Failures that were ours",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in ("ended as", "why", "attempts", "for example"):
        table.add_column(column, overflow="fold", no_wrap=column == "ended as")
    for item in report.failures:
        table.add_row(words.plain(item.stop_reason), Text(item.why), str(item.attempts), Text(item.example))
    return table


def _publications(report: Report) -> Table:
    table = _table("Last versions", "version", "size", "publish", "engine", "pause", "proven", "canary max |Δ|")
    for item in report.publications[-LAST_VERSIONS:]:
        head = (str(item.version), words.size(item.bytes), words.seconds(item.publish_latency_s))
        for load in item.loads:
            proven = "yes" if load.proven else f"no: {load.why}"
            table.add_row(*head, load.engine, words.seconds(load.pause_s), proven, words.small(load.canary_max_abs))
            head = ("", "", "")
        if not item.loads:
            table.add_row(*head, words.NONE, words.NONE, words.NONE, words.NONE)
    return table
