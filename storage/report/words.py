"""Figures as people read them. One place, so that terminal and page say the same."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from storage.report.evaluation_parts import IntervalPart
from storage.report.model import GpuHoursPart, SurplusPart
from storage.report.parts import IncidentPart
from storage.report.rewards import AffectedPart

MOST_INCIDENTS = 50
"""Those that terminal and page show, the last ones."""
NONE = "–"  # noqa: RUF001 (an en dash is what a person expects for "no figure")


def reward(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


def interval(part: IntervalPart | None, *, signed: bool = False) -> str:
    """A mean with its 95 % interval: `0.803 [0.671, 0.894]`, and `+0.050 [-0.020, +0.120]` of a difference."""
    if part is None:
        return NONE
    form = "+.3f" if signed else ".3f"
    if part.low is None or part.high is None:
        return f"{part.mean:{form}} (one task: no interval)"
    return f"{part.mean:{form}} [{part.low:{form}}, {part.high:{form}}]"


def pass_at(rates: Mapping[int, IntervalPart]) -> str:
    """`pass@1 0.750, pass@4 0.934`"""
    return ", ".join(f"pass@{k} {rate.mean:.3f}" for k, rate in rates.items()) or NONE


def seconds(value: float | None) -> str:
    if value is None:
        return NONE
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def share(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.1%}" if 0 < value < 0.1 else f"{value:.0%}"


def size(value: float | None) -> str:
    if value is None:
        return NONE
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def small(value: float | None) -> str:
    """Divergences: three digits, whatever their size."""
    if value is None:
        return NONE
    return "0" if value == 0 else f"{value:.1e}" if abs(value) < 1e-3 else f"{value:.3g}"


def count(value: float | None) -> str:
    return NONE if value is None else f"{value:.0f}" if value == round(value) else f"{value:g}"


def nats(value: float | None) -> str:
    """A log-probability."""
    return NONE if value is None else f"{value + 0.0:.3f}"


def gap(value: float | None) -> str:
    """A difference of two log-probabilities."""
    return NONE if value is None else f"{value + 0.0:+.4f}"


def moment(value: float | None) -> str:
    return NONE if value is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(value))


def plain(name: str) -> str:
    """`infra_failure` as `infra failure`."""
    return name.replace("_", " ")


def axis_seconds(value: float) -> str:
    """A duration, short, for an axis: `0`, `0.5 s`, `40 s`, `1.5 min`, `3.2 h`."""
    if value < 100:
        return f"{value:.3g} s" if value else "0"
    return f"{value / 60:.3g} min" if value < 6000 else f"{value / 3600:.3g} h"


def axis_clock(value: float) -> str:
    """A moment since the start, for an axis: `0:40`, `12:05`, and `3h05` from an hour on."""
    minutes, rest = divmod(round(value), 60)
    return f"{minutes // 60}h{minutes % 60:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def span(item: IncidentPart, started_at: float) -> str:
    """When it was, after the run's start: `6:20`, `6:20 to 7:05`."""
    first, last = (axis_clock(max(0.0, at - started_at)) for at in (item.at, item.until))
    return first if first == last else f"{first} to {last}"


def axis_small(value: float) -> str:
    """Short, for a logarithmic axis: `0.01`, `1e-4`."""
    return f"{value:g}" if value >= 1e-3 else f"{value:.0e}".replace("e-0", "e-")


def bare_seconds(value: float | None) -> str:
    """Under a head that says seconds."""
    return NONE if value is None else f"{value:.1f}"


def versions(low: int | None, high: int | None) -> str:
    return NONE if low is None else str(low) if low == high else f"{low} to {high}"


def length(value: float | None) -> str:
    """Mean tokens of an episode."""
    return NONE if value is None else f"{value:.1f}"


def surplus(part: SurplusPart) -> str:
    return (
        f"{part.groups} groups, {part.attempts} attempts, {thousands(part.sampled_tokens)} tokens,"
        f" {seconds(part.seconds)} of episodes"
    )


def gpu_hours(part: GpuHoursPart) -> str:
    """Example: `0.31 (act 0.20, queue 0.11) of 8 GPUs, cost 0.78`."""
    if part.waiting_on_env is None:
        return NONE
    causes = ", ".join(f"{name} {value:.3g}" for name, value in sorted(part.by_cause.items(), key=_largest) if value)
    cost = "" if part.cost is None else f", cost {part.cost:,.2f}"
    gpus = "GPU" if part.gpus == 1 else "GPUs"
    return f"{part.waiting_on_env:.3g}" + (f" ({causes})" if causes else "") + f" of {part.gpus:g} {gpus}{cost}"


def _largest(item: tuple[str, float]) -> float:
    return -item[1]


def thousands(value: int) -> str:
    return f"{value:,}".replace(",", "\u202f")


def affected(part: AffectedPart) -> str:
    """Example: `64 of 960 episodes (6.7%), trained 64 times: 8 of 15 batches, 6.7% of the trained tokens`."""
    text = f"{part.episodes} of {part.of_episodes} episodes"
    text += f" ({share(part.episode_share)})" if part.episodes else ""
    if part.trained:
        text += f", trained {part.trained} times: {part.touched_batches} of {part.of_batches} batches"
        text += f", {share(part.token_share)} of the trained tokens"
    else:
        text += ", none trained"
    return text + (f"; {part.waiting} that no batch had taken train no more" if part.waiting else "")


def spans(numbers: Sequence[int]) -> str:
    """Example: `3 to 15`, `1, 3 to 4`, `none yet`."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return ", ".join(versions(low, high) for low, high in found) or "none yet"
