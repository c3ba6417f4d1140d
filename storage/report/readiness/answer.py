"""One of the six answers in the making: figures against limits, and the verdict that they add up to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from storage.report.limits import Section
from storage.report.parts import DetailPart, FigurePart, QuestionPart

SHOWN_ROWS = 8
"""Rows of a table behind an answer, at most."""
NO_UPDATE = "no batch was trained yet: look again after the first update"


class Answer:
    """Collects what decides. `limits`: the question's table of limits.toml, whose name there is `table`."""

    def __init__(self, topic: str, question: str, table: str, limits: Section) -> None:
        self._topic, self._question, self._table, self._limits = topic, question, table, limits
        self._figures: list[FigurePart] = []
        self._details: list[DetailPart] = []
        self._faults: list[str] = []

    def shown(self, name: str, value: float | None, form: Callable[[float | None], str]) -> None:
        """A figure that is asked nothing of."""
        self._figures.append(FigurePart(name=name, value=value, shown=form(value), limit="", field="", ok=None))

    def text(self, name: str, shown: str) -> None:
        """A fact without a number."""
        self._figures.append(FigurePart(name=name, value=None, shown=shown, limit="", field="", ok=None))

    def at_most(
        self,
        name: str,
        value: float | None,
        form: Callable[[float | None], str],
        field: str,
        *,
        because: str = "",
        limit: float | None = None,
    ) -> None:
        """A figure that must not be above its limit. `because`: who or what is behind it; `limit`: instead of the one
        that limits.toml has."""
        bound = float(getattr(self._limits, field)) if limit is None else limit
        ok = None if value is None else value <= bound
        self._judge(name, value, form(value), f"at most {form(bound)}", field, ok, because)

    def at_least(
        self, name: str, value: float | None, form: Callable[[float | None], str], field: str, *, because: str = ""
    ) -> None:
        bound = float(getattr(self._limits, field))
        ok = None if value is None else value >= bound
        self._judge(name, value, form(value), f"at least {form(bound)}", field, ok, because)

    def fault(self, sentence: str) -> None:
        """Not ready, whatever the figures say."""
        self._faults.append(sentence)

    def detail(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """A table; left out where it has no row."""
        if shown := [list(row) for row in rows]:
            self._details.append(DetailPart(title=title, columns=list(columns), rows=shown))

    def part(self, summary: str, *, unmeasured: str = "") -> QuestionPart:
        """`summary`: the sentence of a ready verdict; `unmeasured`: what is missing, and what to do about it."""
        verdict: Literal["ready", "not ready", "not measured"]
        if self._faults:
            verdict, why = "not ready", self._faults
        elif unmeasured:
            verdict, why = "not measured", [unmeasured]
        else:
            verdict, why = "ready", [summary]
        return QuestionPart(
            topic=self._topic,
            question=self._question,
            verdict=verdict,
            why=why,
            figures=self._figures,
            details=self._details,
        )

    def _judge(
        self, name: str, value: float | None, shown: str, limit: str, field: str, ok: bool | None, because: str
    ) -> None:
        field = f"{self._table}.{field}"
        self._figures.append(FigurePart(name=name, value=value, shown=shown, limit=limit, field=field, ok=ok))
        if ok is False:
            self._faults.append(f"{name} {shown}, {limit} ({field})" + (f": {because}" if because else ""))
