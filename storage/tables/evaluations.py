"""Evaluations with their results, and how engines serve the weights that they are of."""

from typing import Any

from sqlmodel import Field, SQLModel

from storage.tables.columns import json_column


class Evaluation(SQLModel, table=True):
    run: str = Field(primary_key=True)
    version: int = Field(primary_key=True)
    episodes: int
    mean_reward: float
    excluded: int = 0
    by_kind: dict[str, Any] = json_column()
    ended_at: float


class ServedEvaluation(SQLModel, table=True):
    """One evaluation with the fingerprint that it was made on. `evaluation` has those that are points of a run's own
    curve; here are these and all others, also those that were refused."""

    id: str = Field(primary_key=True)
    """`<run>/eval-v<version>` for a run's own, `<run>/<workflow id>` for one that was asked for. It is the group of its
    episodes."""
    run: str = Field(foreign_key="run.id", index=True)
    version: int
    workflow: str = Field(index=True)
    execution: str = ""
    """The workflow's first execution: a second evaluation under the same id is refused."""
    temporal_namespace: str = ""
    """As in Run: only there is known whether its workflow runs."""
    in_run: bool
    state: str
    """An EvaluationState."""
    reason: str = ""
    request: dict[str, Any] = json_column()
    """What was asked for, as it was given; empty for a run's own."""
    model: str = ""
    taskset: str = ""
    tasks: int = 0
    samples_per_task: int = 1
    seed: int = 0
    manifest: str = ""
    fields: dict[str, Any] = json_column()
    """The fingerprint, field by field."""
    fingerprint: str = ""
    """Its digest; empty where there is no result."""
    settings: str = ""
    """Digest of the fields but for the weights."""
    engines: dict[str, Any] = json_column()
    """Names, with the digest of the parameters that each held."""
    left_out: dict[str, Any] = json_column()
    """Engines that did not carry the version, and why."""
    scores: dict[str, Any] = json_column()
    """By task, `{"rewards": [...], "passed": n}` of the episodes that count, read from their rows at the end."""
    excluded: int = 0
    redone: int = 0
    """Attempts that did not count, because their tokens are of other weights."""
    started_at: float
    ended_at: float | None = None


class Serving(SQLModel, table=True):
    """How an engine was last seen to serve a run's weights, and since when."""

    run: str = Field(primary_key=True)
    engine: str = Field(primary_key=True)
    version: int
    facts: dict[str, Any] = json_column()
    """The engine's part of a fingerprint."""
    seen_at: float
