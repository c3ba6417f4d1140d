"""Charts as inline SVG: lines and stacked bars, nothing from outside, coloured by the page's style sheet.

Every mark has a `<title>`, which browsers show on hover and screen readers read. Classes `s0`..`s7` are the page's
series colours; `ok`, `miss`, `ours` and `odd` those of the four outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 14, 48
MOST_LABELS = 8
BESIDE = 9
"""Between error bars that have one x."""

Point = tuple[float, float]
Words = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """`dots`: draw the points alone, large, with their values beside them."""

    name: str
    style: str
    points: Sequence[Point]
    dots: bool = False


@dataclass(frozen=True)
class Bars:
    """One part of every bar, in the order of the bars."""

    name: str
    style: str
    values: Sequence[float]


@dataclass(frozen=True)
class _Frame:
    """Where values lie on the drawing. `log`: the y axis is logarithmic."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    log: bool = False

    def x(self, value: float) -> float:
        share = (value - self.x_low) / (self.x_high - self.x_low) if self.x_high > self.x_low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high, at = self.y_low, self.y_high, max(value, self.y_low)
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        return TOP + (1 - (at - low) / ((high - low) or 1)) * (HEIGHT - TOP - BOTTOM)

    def y_ticks(self) -> list[float]:
        if self.log:
            first, last = math.ceil(math.log10(self.y_low)), math.floor(math.log10(self.y_high))
            every = max(1, (last - first) // 4)
            return [10.0**power for power in range(first, last + 1, every)]
        return nice_ticks(self.y_low, self.y_high)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers from low to high."""
    span = (high - low) or 1.0
    rough = span / count
    base = 10.0 ** math.floor(math.log10(rough))
    step = next(base * factor for factor in (1, 2, 5, 10) if base * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 10) for index in range(first, last + 1)]


def lines(
    series: Sequence[Line],
    *,
    words: Words,
    axis: Words | None = None,
    x_name: str = "step",
    y_range: Point | None = None,
    log: bool = False,
    limit: tuple[str, float] | None = None,
) -> Markup:
    """Lines over a numeric x axis; `limit` is a dashed line with its name; `axis` are the words of the
    axis where they are shorter. Empty where there is no point."""
    points = [point for line in series for point in line.points if not log or point[1] > 0]
    if not points:
        return Markup("")
    values = [y for _, y in points] + ([limit[1]] if limit else [])
    frame = _Frame(min(x for x, _ in points), max(x for x, _ in points), *_range(values, y_range, log), log)
    ticks = [tick for tick in nice_ticks(frame.x_low, frame.x_high, 6) if tick == int(tick)]
    parts = [_axes(frame, axis or words, x_name, [(frame.x(tick), f"{tick:g}") for tick in ticks])]
    if limit:
        y = frame.y(limit[1])
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="value note" x="{LEFT + 6}" y="{y - 6:.1f}">{escape(limit[0])}</text>')
    for line in series:
        parts += _dots(frame, line, words) if line.dots else _line(frame, line, words, x_name)
    return _svg(parts, ", ".join(line.name for line in series))


def _range(values: Sequence[float], wanted: Point | None, log: bool) -> Point:
    low, high = min(values), max(values)
    if log:
        return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high * 1.001))
    if wanted:
        return min(low, wanted[0]), max(high, wanted[1])
    return min(0.0, low), (high * 1.08 or 1.0)


def _line(frame: _Frame, line: Line, words: Words, x_name: str) -> list[str]:
    shown = [(x, y) for x, y in line.points if not frame.log or y > 0]
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in shown)
    marks = [
        f'<circle class="{line.style}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3">'
        f"<title>{escape(line.name)}, {x_name} {x:g}: {escape(words(y))}</title></circle>"
        for x, y in shown
    ]
    return [f'<polyline class="{line.style}" points="{path}"/>', *marks]


def _dots(frame: _Frame, line: Line, words: Words) -> list[str]:
    parts = []
    for x, y in line.points:
        at_x, at_y = frame.x(x), frame.y(y)
        anchor = "start" if at_x < LEFT + 40 else "end" if at_x > WIDTH - RIGHT - 40 else "middle"
        above = at_y - 11 if at_y > TOP + 24 else at_y + 21
        parts.append(
            f'<circle class="{line.style} big" cx="{at_x:.1f}" cy="{at_y:.1f}" r="6">'
            f"<title>{escape(line.name)}, version {x:g}: {escape(words(y))}</title></circle>"
            f'<text class="value" x="{at_x:.1f}" y="{above:.1f}" text-anchor="{anchor}">{escape(words(y))}</text>'
        )
    return parts


@dataclass(frozen=True)
class Estimate:
    """A value with what it may as well be, at `x`. `low` and `high` are None where that is not known."""

    x: float
    value: float
    low: float | None
    high: float | None
    name: str


def error_bars(
    series: Sequence[tuple[str, str, Sequence[Estimate]]],
    *,
    words: Words,
    x_name: str,
    y_range: Point | None = None,
) -> Markup:
    """Dots with whiskers; `series` are (name, style, estimates), which stand side by side where they have one x. Empty
    where there is none."""
    drawn = [item for _, _, items in series for item in items]
    if not drawn:
        return Markup("")
    values = [value for item in drawn for value in (item.value, item.low, item.high) if value is not None]
    low, high = min(item.x for item in drawn), max(item.x for item in drawn)
    margin = 0.06 * (high - low) or 0.5
    frame = _Frame(low - margin, high + margin, *_range(values, y_range, log=False))
    ticks = sorted({item.x for item in drawn})
    every = math.ceil(len(ticks) / MOST_LABELS)
    labels = [(frame.x(tick), f"{tick:g}") for index, tick in enumerate(ticks) if index % every == 0]
    parts = [_axes(frame, words, x_name, labels)]
    for index, (name, style, items) in enumerate(series):
        beside = BESIDE * (index - (len(series) - 1) / 2)
        parts += [_whisker(frame, item, name, style, beside, words, x_name) for item in items]
    return _svg(parts, ", ".join(name for name, _, _ in series))


def _whisker(frame: _Frame, item: Estimate, name: str, style: str, beside: float, words: Words, x_name: str) -> str:
    x, y, told = frame.x(item.x) + beside, frame.y(item.value), words(item.value)
    line = ""
    if item.low is not None and item.high is not None:
        low, high = frame.y(item.low), frame.y(item.high)
        told += f", 95 % interval {words(item.low)} to {words(item.high)}"
        for points in (
            f"{x:.1f},{low:.1f} {x:.1f},{high:.1f}",
            f"{x - 5:.1f},{low:.1f} {x + 5:.1f},{low:.1f}",
            f"{x - 5:.1f},{high:.1f} {x + 5:.1f},{high:.1f}",
        ):
            line += f'<polyline class="{style}" points="{points}"/>'
    title = f"<title>{escape(f'{item.name or name}, {x_name} {item.x:g}: {told}')}</title>"
    return f'{line}<circle class="{style} big" cx="{x:.1f}" cy="{y:.1f}" r="6">{title}</circle>'


def stacked(
    labels: Sequence[str],
    parts: Sequence[Bars],
    *,
    words: Words,
    axis: Words | None = None,
    x_name: str = "step",
    over: Line | None = None,
    details: Sequence[str] = (),
) -> Markup:
    """A stacked bar per label; `over` is a line whose x is the bar's index; `details` are the bars' names where a
    reader asks for more than the label. Empty where every value is 0."""
    totals = [sum(part.values[index] for part in parts) for index in range(len(labels))]
    high = max([*totals, *(y for _, y in (over.points if over else []))], default=0.0)
    if high <= 0:
        return Markup("")
    frame = _Frame(-0.5, len(labels) - 0.5, 0.0, high * 1.05)
    width = (WIDTH - LEFT - RIGHT) / len(labels) * (0.72 if len(labels) < 40 else 0.9)
    every = math.ceil(len(labels) / MOST_LABELS)
    ticks = [(frame.x(index), label) for index, label in enumerate(labels) if index % every == 0]
    drawn = [_axes(frame, axis or words, x_name, ticks)]
    for index, label in enumerate(details or labels):
        bottom = 0.0
        for part in parts:
            value = part.values[index]
            if value > 0:
                top, foot = frame.y(bottom + value), frame.y(bottom)
                drawn.append(
                    f'<rect class="{part.style}" x="{frame.x(index) - width / 2:.1f}" y="{top:.1f}" '
                    f'width="{width:.1f}" height="{max(foot - top, 0.5):.1f}">'
                    f"<title>{escape(part.name)}, {x_name} {escape(label)}: {escape(words(value))}</title></rect>"
                )
            bottom += value
    if over:
        drawn += _line(frame, over, words, x_name)
    return _svg(drawn, ", ".join(part.name for part in parts))


def _axes(frame: _Frame, words: Words, x_name: str, x_ticks: Sequence[tuple[float, str]]) -> str:
    parts = []
    for tick in frame.y_ticks():
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(words(tick))}</text>')
    foot = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{foot}" y2="{foot}"/>')
    for x, label in x_ticks:
        parts.append(f'<text x="{x:.1f}" y="{foot + 19}" text-anchor="middle">{escape(label)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="name" x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">{escape(x_name)}</text>')
    return "".join(parts)


def _svg(parts: Sequence[str], label: str) -> Markup:
    body = "".join(parts)
    return Markup(f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{body}</svg>')
