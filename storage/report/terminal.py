"""A report in a terminal: the six answers, the headline figures, the reward curve, and the tables behind them."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from storage.printable import one_line, printable
from storage.report import words
from storage.report.evaluation_terminal import evaluations_table
from storage.report.model import TIME_PARTS, Report
from storage.report.parts import DetailPart, FigurePart, QuestionPart
from storage.report.rewards_terminal import reward_tables
from storage.report.taskset_terminal import render_taskset

PLOT_HEIGHT = 9
PLOT_WIDTH = 60
LAST_STEPS = 12
LAST_VERSIONS = 6
LAST_TROUBLES = 12
VERDICT_STYLES = {"ready": "green", "not ready": "bold red", "not measured": "yellow"}
INDENT = 16
"""Columns before what belongs to an answer."""
SHORT = {"generate": "gen", "wait_for_siblings": "siblings", "wait_for_batch": "pool"}
"""Heads of columns that are narrower than the names of their parts."""


def render_terminal(report: Report, console: Console) -> None:
    """Print the report to the console."""
    console.print(_title(report))
    if report.reason:
        console.print(Text(one_line(report.reason)))
    render_readiness(report, console)
    _headline(report, console)
    if curve := reward_plot(report):
        console.print(Text(curve))
    for table in _tables(report):
        if table.row_count:
            console.print(table)
    render_taskset(report.taskset_health, console)


def _tables(report: Report) -> list[Table]:
    first = [_steps(report), _waits(report), _endings(report), _kinds(report), _failures(report)]
    first += [_quarantined(report), *reward_tables(report.rewards)]
    first.append(evaluations_table(report.evaluation.measured))
    return [*first, _void(report), _publications(report), _weight_troubles(report), _incidents(report)]


def _title(report: Report) -> Text:
    return Text(f"run {report.run}", style="bold") + Text(f"  {report.state}")


def render_readiness(report: Report, console: Console) -> None:
    """Print the six answers; those that are not ready with the tables behind them."""
    console.print()
    for answer in report.readiness:
        verdict = Text(f"{answer.verdict:<{INDENT}}", style=VERDICT_STYLES[answer.verdict])
        console.print(verdict + Text(answer.question, style="bold"))
        for sentence in answer.why:
            console.print(Padding(Text(one_line(sentence)), (0, 0, 0, INDENT)))
        _figures(answer, console)
        for detail in answer.details if answer.verdict == "not ready" else []:
            console.print(Padding(_detail(detail), (0, 0, 0, INDENT)))
    console.print()


def _figures(answer: QuestionPart, console: Console) -> None:
    width = max(len(figure.name) for figure in answer.figures)
    for figure in answer.figures:
        line = Text(f"{figure.name:<{width}}  ", style="dim") + _figure(figure)
        console.print(Padding(line, (0, 0, 0, INDENT)))


def _figure(figure: FigurePart) -> Text:
    shown = Text(one_line(figure.shown), style="red" if figure.ok is False else "")
    return shown + Text(f", {figure.limit}" if figure.limit else "", style="dim")


def _detail(detail: DetailPart) -> Table:
    table = _bare(detail.title)
    for name in detail.columns:
        table.add_column(name, overflow="fold")
    for row in detail.rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    return table


def _headline(report: Report, console: Console) -> None:
    means, small = report.summary, words.small
    lines = {
        "policy": f"{report.model} on {report.taskset}, {report.mode}, seed {report.seed}",
        "steps": f"{report.step} of {report.steps_planned} in {words.seconds(report.seconds)}, all told",
        "held-out reward": _held_out(report),
        "time to trainable batch": f"{words.seconds(means.time_to_trainable_batch_s)} median, "
        f"{words.seconds(means.tail_s)} of it for the last 5 % of the episodes",
        "GPU-hours on environment": words.gpu_hours(report.gpu_hours),
        "failures that were ours": words.share(means.infra_share),
        "off-policy steps": f"mean {small(means.off_policy_steps)}, most {small(means.off_policy_steps_max)}",
        "mismatch_kl": f"mean {small(means.mismatch_kl)}, most {small(means.mismatch_kl_max)}",
        "weight sync": f"publish {words.seconds(means.publish_latency_s)}, pause {words.seconds(means.pause_s)}",
        "tokens": f"{words.thousands(means.sampled_tokens)} sampled, "
        f"{words.share(means.cache_hit_share)} of prompt tokens from cache",
        "groups": f"{report.groups.closed} closed, {report.groups.trained} trained"
        + "".join(f", {count} {words.plain(reason)}" for reason, count in report.groups.dropped.items()),
        "pool, per episode": _pool(report),
        "surplus": words.surplus(report.groups.surplus) if report.groups.surplus.attempts else "none",
        "short groups": f"{report.groups.short} closed, {words.share(means.short_share)} of a batch",
    }
    for name, value in lines.items():
        console.print(Text(f"  {name:<25}", style="dim") + Text(printable(value)))


def _pool(report: Report) -> str:
    """Whether it prefers the short: mean tokens and reward of an episode, of what trained and of what began."""
    order = report.finish_order
    consumed = f"{words.length(order.tokens_consumed)} tokens, reward {words.reward(order.reward_consumed)}"
    admitted = f"{words.length(order.tokens_admitted)}, {words.reward(order.reward_admitted)}"
    return f"{order.policy}; consumed {consumed}; admitted {admitted}"


def _held_out(report: Report) -> str:
    points = report.evaluation.versions
    if not points:
        return words.NONE
    first = f"{words.reward(points[0].mean_reward)} (version {points[0].version}, {points[0].episodes} episodes)"
    if len(points) == 1:
        return first
    return f"{first} -> {words.reward(points[-1].mean_reward)} (version {points[-1].version})"


def reward_plot(report: Report) -> str:
    """The rewards over steps as text: `·` mean of a step's batch, `○` of all training episodes, `◆` of held-out tasks.
    Empty without a step."""
    batches = [(step.step, step.reward) for step in report.steps]
    training = [(item.version, item.mean_reward) for item in report.versions]
    held_out = [(point.version, point.mean_reward) for point in report.evaluation.versions]
    if not batches:
        return ""
    every = [value for _, value in batches + training + held_out]
    low, high = min(0.0, *every), max(1.0, *every)
    last = max(1, *(x for x, _ in batches + training + held_out))
    rows = [[" "] * (PLOT_WIDTH + 1) for _ in range(PLOT_HEIGHT)]
    for points, mark in ((training, "○"), (batches, "·"), (held_out, "◆")):
        for x, value in points:
            line = round((high - value) / (high - low) * (PLOT_HEIGHT - 1))
            rows[line][round(x / last * PLOT_WIDTH)] = mark
    labels = {0: high, PLOT_HEIGHT // 2: (high + low) / 2, PLOT_HEIGHT - 1: low}
    lines = [
        f"  {labels[index]:6.2f} ┤{''.join(row)}" if index in labels else f"         │{''.join(row)}"
        for index, row in enumerate(rows)
    ]
    axis = f"         └{'─' * (PLOT_WIDTH + 1)}\n          0{'step':^{PLOT_WIDTH - 1 - len(str(last))}}{last}"
    marks = "          ◆ held-out tasks   ○ training episodes, by the version that ended them"
    batch = "          · batches, which hold only groups whose siblings differ and so tend to the middle"
    return "\n".join(["", *lines, axis, marks, batch, ""])


def _bare(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _table(title: str, *columns: str) -> Table:
    table = _bare(title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _steps(report: Report) -> Table:
    table = _table(_last_steps(report), "step", "reward", "groups", "episodes", "time to batch", "age", "mismatch")
    for step in report.steps[-LAST_STEPS:]:
        table.add_row(
            str(step.step),
            words.reward(step.reward),
            str(step.groups),
            str(step.episodes),
            words.seconds(step.time.get("to_trainable_batch")),
            words.small(step.metrics.get("off_policy/steps")),
            words.small(step.metrics.get("mismatch_kl/mean")),
        )
    return table


def _last_steps(report: Report) -> str:
    return "Steps" if len(report.steps) <= LAST_STEPS else f"Last {LAST_STEPS} of {len(report.steps)} steps"


def _waits(report: Report) -> Table:
    names = [name for name in TIME_PARTS if any(name in step.time for step in report.steps)]
    heads = ("step", "total", *(SHORT.get(name, name) for name in names), "last 5 %", "last group")
    table = _table(f"{_last_steps(report)}: seconds to the batch, its parts on average, and its tail", *heads)
    for step in report.steps[-LAST_STEPS:]:
        spent = [step.time.get(name) for name in ("to_trainable_batch", *names, "tail")]
        group = step.tail.group.rpartition("/")[2] if step.tail else words.NONE
        table.add_row(str(step.step), *map(words.bare_seconds, spent), group)
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
    """In training, and held out: the first evaluation beside the last."""
    points = report.evaluation.versions
    ends = points[:1] + points[1:][-1:]
    heads = [f"held out, version {point.version}" for point in ends]
    table = _table("Kinds of task", "kind", "episodes", "valid", "mean reward", *heads)
    trained = {
        item.kind: (str(item.episodes), str(item.valid), words.reward(item.mean_reward)) for item in report.kinds
    }
    for kind in sorted(trained.keys() | {kind for point in ends for kind in point.by_kind}):
        held_out = [words.reward(point.by_kind.get(kind)) for point in ends]
        table.add_row(Text(one_line(kind) or words.NONE), *trained.get(kind, ("0", "0", words.NONE)), *held_out)
    return table


def _folding(title: str, *columns: str) -> Table:
    """Like `_table`, with long words folded in all columns but the first."""
    table = _bare(title)
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=index == 0)
    return table


def _quarantined(report: Report) -> Table:
    table = _folding("Tasks in quarantine", "since", "task", "why")
    for item in report.quarantined:
        table.add_row(words.moment(item.since), Text(one_line(item.task)), Text(one_line(item.why)))
    return table


def _void(report: Report) -> Table:
    table = _folding("Batches that taught nothing", "step", "batch", "groups", "why")
    for item in report.void_batches:
        table.add_row(str(item.step), Text(item.batch_id), str(item.groups), Text(one_line(item.reason)))
    return table


def _failures(report: Report) -> Table:
    table = _folding("Failures that were ours", "ended as", "why", "attempts", "for example")
    for item in report.failures:
        table.add_row(words.plain(item.stop_reason), Text(one_line(item.why)), str(item.attempts), Text(item.example))
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


def _weight_troubles(report: Report) -> Table:
    last, count = report.weight_troubles[-LAST_TROUBLES:], len(report.weight_troubles)
    title = "Weight updates that went wrong" + (f", the last {len(last)} of {count}" if len(last) < count else "")
    table = _folding(title, "version", "where", "what went wrong", "how it ended")
    for item in last:
        where = Text(one_line(item.engine or "publication"))
        table.add_row(str(item.version), where, Text(one_line(item.what)), Text(one_line(item.ending)))
    return table


def _incidents(report: Report) -> Table:
    shown, count = report.incidents[-words.MOST_INCIDENTS :], len(report.incidents)
    title = "Incidents" + (f", the last {len(shown)} of {count}" if len(shown) < count else "")
    table = _folding(title, "after start", "what", "where", "times", "why")
    for item in shown:
        where, why = Text(one_line(item.where) or words.NONE), Text(one_line(item.why) or words.NONE)
        table.add_row(words.span(item, report.started_at), item.what, where, str(item.count), why)
    return table
