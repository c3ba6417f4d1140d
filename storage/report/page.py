"""A report as one self-contained HTML page: inline style, inline SVG, no request to anywhere, light and dark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from markupsafe import Markup

from storage.report import charts, taskset_views, words
from storage.report.html import templates
from storage.report.model import TIME_PARTS, Report
from storage.report.taskset import TasksetStepPart
from workflows.contracts import Outcome

OUTCOME_STYLES = {
    Outcome.MODEL_SUCCESS: "ok",
    Outcome.MODEL_FAILURE: "miss",
    Outcome.INFRA_FAILURE: "ours",
    Outcome.UNKNOWN: "odd",
    Outcome.SURPLUS: "s5",
}
MOST_KINDS = 4
"""Ways to serve that a chart tells apart, the newest."""


@dataclass(frozen=True)
class Figure:
    """A chart with what a reader needs to read it. `legend`: (style, name) pairs."""

    title: str
    note: str
    svg: Markup
    legend: list[tuple[str, str]]


@dataclass(frozen=True)
class Headline:
    name: str
    value: str
    note: str
    mark: str = ""


def render_html(report: Report) -> str:
    """The page."""
    made = (_rewards, _held_out, _waiting, _last, _outcomes, _age, _mismatch, _tasks, _draws)
    figures = [item for item in (make(report) for make in made) if item.svg]
    return (
        templates()
        .get_template("page.html.j2")
        .render(
            report=report,
            headlines=_headlines(report),
            figures=figures,
            outcome_styles=OUTCOME_STYLES,
            time_parts=TIME_PARTS,
            views=taskset_views,
        )
    )


def _headlines(report: Report) -> list[Headline]:
    means, evaluation = report.summary, report.evaluation
    gain = evaluation.last - evaluation.first if evaluation.first is not None and evaluation.last is not None else None
    latest = evaluation.last if evaluation.last is not None else evaluation.first
    over = bool(report.max_mismatch_kl and (means.mismatch_kl or 0) > report.max_mismatch_kl)
    return [
        Headline(
            "Held-out reward",
            words.reward(latest),
            f"{gain:+.3f} since version {evaluation.versions[0].version}" if gain is not None else "no comparison yet",
            "" if gain is None else "good" if gain > 0 else "bad" if gain < 0 else "",
        ),
        Headline("Steps", f"{report.step} / {report.steps_planned}", f"in {words.seconds(report.seconds)}"),
        Headline("Time to trainable batch", words.seconds(means.time_to_trainable_batch_s), _tail(report)),
        Headline(
            "Failures that were ours",
            words.share(means.infra_share),
            "of training attempts; never in the gradient",
            "bad" if (means.infra_share or 0) > 0.1 else "",
        ),
        Headline(
            "Off-policy steps",
            words.small(means.off_policy_steps),
            f"mean; at most {words.small(means.off_policy_steps_max)}",
        ),
        Headline(
            "Trainer vs engine",
            words.small(means.mismatch_kl),
            f"mean mismatch_kl; stops at {words.small(report.max_mismatch_kl)}",
            "bad" if over else "",
        ),
        Headline(
            "Pause per weight update",
            words.seconds(means.pause_s),
            f"publishing takes {words.seconds(means.publish_latency_s)}",
        ),
        Headline(
            "Groups trained",
            f"{report.groups.trained} / {report.groups.closed}",
            f"{report.groups.replaced_attempts} attempts replaced",
        ),
    ]


def _rewards(report: Report) -> Figure:
    series = [
        charts.Line("all training episodes", "s5", [(item.version, item.mean_reward) for item in report.versions]),
        charts.Line("batch", "s0", [(step.step, step.reward) for step in report.steps]),
        charts.Line(
            "held-out tasks",
            "s1",
            [(point.version, point.mean_reward) for point in report.evaluation.versions],
            dots=True,
        ),
    ]
    return Figure(
        "Reward",
        "Batches hold only groups whose siblings differ, so they tend to the middle; all valid training episodes are"
        " shown by the version that ended them; held-out tasks are what counts.",
        charts.lines(series, words=lambda value: f"{value:.2f}", x_name="step (version)", y_range=(0.0, 1.0)),
        [(line.style, line.name) for line in series if line.points],
    )


def _held_out(report: Report) -> Figure:
    """Every result with its interval; one colour for each way to serve."""
    results = [item for item in report.evaluation.measured if item.counts]
    kinds = list(dict.fromkeys(item.settings for item in results))[-MOST_KINDS:]
    series = []
    for index, settings in enumerate(kinds):
        alike = [item for item in results if item.settings == settings]
        name = f"{alike[0].fields.get('dtype', '')} ({settings[:6]})" + (", stale" if alike[-1].stale else "")
        estimates = [
            charts.Estimate(item.version, item.reward.mean, item.reward.low, item.reward.high, item.id)
            for item in alike
            if item.reward is not None
        ]
        series.append((name, f"s{index}", estimates))
    return Figure(
        "Held-out reward and how sure it is",
        "Bars are 95 % intervals over tasks: where two overlap much, more tasks or samples have to decide. One colour"
        " for each way in which the engines served; names in brackets are digests of it.",
        charts.error_bars(series, words=lambda value: f"{value:.2f}", x_name="version", y_range=(0.0, 1.0)),
        [(style, name) for name, style, _ in series],
    )


def _tail(report: Report) -> str:
    seconds = report.summary.tail_s
    return "median over steps" if seconds is None else f"median; {words.seconds(seconds)} of it for the last 5 %"


def _parts(times: list[dict[str, float]]) -> list[charts.Bars]:
    return [
        charts.Bars(words.plain(name), f"s{index}", [time.get(name, 0.0) for time in times])
        for index, name in enumerate(TIME_PARTS)
        if any(time.get(name) for time in times)
    ]


def _waiting(report: Report) -> Figure:
    times = [step.time for step in report.steps]
    parts = _parts(times)
    early = [(index, time["to_trainable_batch"] - time["tail"]) for index, time in enumerate(times) if "tail" in time]
    return Figure(
        "Time to trainable batch",
        "Bars: how the batch's episodes divide its wait on average; the parts add up to it. Line: 95 % of them had"
        " ended; what is above it was spent on the last 5 %.",
        charts.stacked(
            [str(step.step) for step in report.steps],
            parts,
            words=words.seconds,
            axis=words.axis_seconds,
            over=charts.Line("95 % had ended", "total", early),
        ),
        [("total", "95 % had ended"), *((part.style, part.name) for part in parts)],
    )


def _last(report: Report) -> Figure:
    tails = [step.tail for step in report.steps]
    parts = _parts([tail.parts if tail else {} for tail in tails])
    names = [
        f"{step.step}" + (f" ({tail.attempt})" if tail else "") for step, tail in zip(report.steps, tails, strict=True)
    ]
    return Figure(
        "The attempt that came last",
        "What the last attempt of the last group did while the batch waited: where to look when the tail is long.",
        charts.stacked(
            [str(step.step) for step in report.steps],
            parts,
            words=words.seconds,
            axis=words.axis_seconds,
            details=names,
        ),
        [(part.style, part.name) for part in parts],
    )


def _outcomes(report: Report) -> Figure:
    buckets = report.outcomes_over_time
    parts = [
        charts.Bars(words.plain(name), style, [float(bucket.outcomes.get(name, 0)) for bucket in buckets])
        for name, style in OUTCOME_STYLES.items()
        if any(bucket.outcomes.get(name) for bucket in buckets)
    ]
    return Figure(
        "Outcomes of training attempts",
        "By the time at which they ended. Infrastructure failures and unknown endings are replaced and train nothing.",
        charts.stacked(
            [words.axis_clock(bucket.from_s) for bucket in buckets],
            parts,
            words=lambda value: f"{value:g}",
            x_name="time since the start",
        ),
        [(part.style, part.name) for part in parts],
    )


def _age(report: Report) -> Figure:
    steps = [step for step in report.steps if "off_policy/steps" in step.metrics]
    parts = [
        charts.Bars(name, style, [step.metrics.get(f"off_policy/{key}") or 0.0 for step in steps])
        for key, name, style in (("in_flight", "while it was made", "s2"), ("in_pool", "while it waited", "s4"))
    ]
    oldest = [(index, step.metrics.get("off_policy/steps_max") or 0.0) for index, step in enumerate(steps)]
    return Figure(
        "Age of the tokens",
        "Versions between a token and the update it trained: bars are means, the line is the oldest token.",
        charts.stacked(
            [str(step.step) for step in steps],
            parts,
            words=lambda value: f"{value:.3g}",
            over=charts.Line("oldest token", "total", oldest),
        ),
        [("total", "oldest token"), *((part.style, part.name) for part in parts)],
    )


def _tasks(report: Report) -> Figure:
    return _pools(
        report,
        "Taskset health: tasks by pool",
        "Once the groups that ended under a version had closed. What is hard or learning still teaches.",
        lambda step: {name: float(count) for name, count in step.tasks.items()},
        lambda value: f"{value:g}",
    )


def _draws(report: Report) -> Figure:
    def shares(step: TasksetStepPart) -> dict[str, float]:
        total = sum(step.episodes.values())
        return {name: count / total for name, count in step.episodes.items()}

    return _pools(
        report,
        "Taskset health: what the episodes went to",
        "Share of a version's valid episodes, by the pool that their task was in when it came.",
        shares,
        words.share,
    )


def _pools(
    report: Report,
    title: str,
    note: str,
    values: Callable[[TasksetStepPart], dict[str, float]],
    shown: Callable[[float], str],
) -> Figure:
    steps = report.taskset_health.steps
    found = [values(step) for step in steps]
    parts = [
        charts.Bars(name, style, [step[name] for step in found])
        for name, style in taskset_views.STYLES.items()
        if any(step[name] for step in found)
    ]
    svg = charts.stacked([str(step.version) for step in steps], parts, words=shown, x_name="policy version")
    return Figure(title, note, svg, [(part.style, part.name) for part in parts])


def _mismatch(report: Report) -> Figure:
    def line(name: str, style: str, key: str) -> charts.Line:
        points = [(step.step, value) for step in report.steps if (value := step.metrics.get(key)) is not None]
        return charts.Line(name, style, points)

    series = [
        line("mismatch_kl: numerics, same weights", "s0", "mismatch_kl/mean"),
        line("divergence: then and now", "s3", "off_policy/divergence"),
    ]
    limit = ("max_mismatch_kl", report.max_mismatch_kl) if report.max_mismatch_kl else None
    return Figure(
        "Agreement of trainer and engine",
        "k3 estimates per token, logarithmic: mismatch_kl on tokens of the trainer's own weights, divergence on all.",
        charts.lines(series, words=words.small, axis=words.axis_small, log=True, limit=limit),
        [(item.style, item.name) for item in series if item.points],
    )
