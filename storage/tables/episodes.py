"""Groups, the attempts at their episodes, and the turns of those."""

from typing import Any

from sqlalchemy import JSON, Column
from sqlmodel import Field, SQLModel

from storage.tables.columns import json_column


class Group(SQLModel, table=True):
    id: str = Field(primary_key=True)
    run: str = Field(foreign_key="run.id", index=True)
    task: str = Field(index=True)
    number: int
    eligible: bool
    reason: str = ""
    mean_reward: float | None = None
    outcomes: dict[str, Any] = json_column()
    members: list[str] | None = Field(None, sa_column=Column(JSON(none_as_null=True), nullable=True))
    """Attempts that may train, in sibling order; None in rows older than the column: all valid ones."""
    replaced: int = 0
    short: bool = False
    """Closed with fewer valid siblings than the run's `group_size`."""
    replay: str = Field("", sa_column_kwargs={"server_default": ""})
    """The archived success that joined it, an attempt id; empty for most."""
    draw: int | None = None
    """Number of the draw that it was for; None where the run took its tasks in order."""
    started_at: float
    closed_at: float


class Episode(SQLModel, table=True):
    """One attempt at an episode; `id` is the attempt id, which is its workflow id too."""

    id: str = Field(primary_key=True)
    episode_id: str = Field(index=True)
    group_id: str = Field(index=True)
    run: str = Field(foreign_key="run.id", index=True)
    kind: str
    task: str = Field(index=True)
    attempt: int
    outcome: str = Field(index=True)
    stop_reason: str
    reward: float | None
    why: str = ""
    tampered: bool = False
    image_id: str = ""
    host: str = Field("", index=True, sa_column_kwargs={"server_default": ""})
    """Where its last sandbox lived; empty for one that never had any, and in older rows."""
    evidence: dict[str, Any] = json_column()
    """What was measured on the host when the ending had to be laid at the model's door or ours."""
    replays: int = 0
    seed: int = 0
    min_version: int | None = None
    max_version: int | None = None
    sampled_tokens: int = 0
    sequence_tokens: int = 0
    queue_s: float = 0.0
    boot_s: float = 0.0
    generate_s: float = 0.0
    act_s: float = 0.0
    verify_s: float = 0.0
    started_at: float
    ended_at: float


class Turn(SQLModel, table=True):
    episode: str = Field(primary_key=True, foreign_key="episode.id")
    turn: int = Field(primary_key=True)
    segment: str | None = None
    engine: str = ""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    cached_tokens: int = 0
    min_version: int = 0
    max_version: int = 0
    finish_reason: str = ""
    action: str = ""
    exit_code: int | None = None
    timed_out: bool = False
    output_digest: str = ""
    generate_s: float = 0.0
    act_s: float = 0.0
    queue_s: float = 0.0
    asked_at: float = Field(0.0, sa_column_kwargs={"server_default": "0"})
    """When an engine was first asked for the answer; 0 in rows older than the column."""
