"""Metrics of the updates by step, as the answers ask for them."""

from __future__ import annotations

from storage.report.model import Report


def values(report: Report, name: str) -> dict[int, float]:
    """A metric by step."""
    return {step.step: value for step in report.steps if (value := step.metrics.get(name)) is not None}


def worst(values: dict[int, float]) -> float | None:
    return max(values.values(), default=None)


def at(values: dict[int, float], *, lowest: bool = False) -> str:
    """The step with the largest value, or the lowest."""
    return f"step {(min if lowest else max)(values, key=lambda step: values[step])}" if values else ""
