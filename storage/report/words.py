"""Figures as people read them. One place, so that terminal and page say the same."""

from __future__ import annotations

import time

NONE = "–"  # noqa: RUF001 (an en dash is what a person expects for "no figure")


def reward(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


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


def moment(value: float | None) -> str:
    return NONE if value is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(value))


def plain(name: str) -> str:
    """`infra_failure` as `infra failure`."""
    return name.replace("_", " ")


def short_seconds(value: float) -> str:
    """For an axis: `40s`, `12m`, `3h`."""
    if value < 100:
        return f"{value:.0f}s"
    return f"{value / 60:.0f}m" if value < 6000 else f"{value / 3600:.1f}h"
