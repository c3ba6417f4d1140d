"""The base of all that a report holds, and the answers to the six questions: see storage/report/model.py."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FigurePart(Part):
    """One figure of an answer. `limit` are words as `at most 50%`, empty where nothing is asked of it; `field` is the
    limit's name in limits.toml; `ok` is None without a limit or a value."""

    name: str
    value: float | None
    shown: str
    """The value as people read it."""
    limit: str
    field: str
    ok: bool | None


class DetailPart(Part):
    """A small table behind an answer."""

    title: str
    columns: list[str]
    rows: list[list[str]]


class QuestionPart(Part):
    """One of the six questions before a run is scaled, and the answer of its rows.

    `why`: what the verdict rests on; one sentence per figure beyond its limit where it is `not ready`."""

    topic: str
    question: str
    verdict: Literal["ready", "not ready", "not measured"]
    why: list[str]
    figures: list[FigurePart]
    details: list[DetailPart]


class IncidentPart(Part):
    """Something that went wrong in a run, by the time at which it began. Several that are alike are one."""

    at: float
    until: float
    """When it was last seen; `at` for what has no length."""
    what: str
    where: str
    """A place, a task, a batch or a version; empty where none is named."""
    count: int
    """Attempts, tries or groups, as `what` is of them."""
    why: str
    example: str
    """An attempt, by id; empty where there is none."""
