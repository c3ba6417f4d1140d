"""How weights got to the object store and into the engines, and which run has the engines."""

from typing import Any

from sqlmodel import Field, SQLModel

from storage.tables.columns import json_column


class Publication(SQLModel, table=True):
    run: str = Field(primary_key=True)
    version: int = Field(primary_key=True)
    manifest: str
    digest: str
    bytes: int
    seconds: dict[str, Any] = json_column()
    published_at: float


class EngineLoad(SQLModel, table=True):
    run: str = Field(primary_key=True)
    version: int = Field(primary_key=True)
    engine: str = Field(primary_key=True)
    proven: bool
    why: str = ""
    pause_s: float = 0.0
    seconds: dict[str, Any] = json_column()
    cached_tokens_after: int = 0
    canary_max_abs: float = 0.0
    checked: int = Field(0, sa_column_kwargs={"server_default": "0"})
    """Tensors whose checksums in the engine were the manifest's."""
    loaded_at: float


class WeightTry(SQLModel, table=True):
    """One try at a weight update: to publish a version, or to bring it to an engine. Written when it begins."""

    id: str = Field(primary_key=True)
    run: str = Field(index=True)
    version: int
    engine: str = ""
    """Empty: the publication."""
    part: str
    """The one in which it is or ended. Of a load `reach`, `fetch`, `stage`, `swap`, `prove`, or `restart` for an engine
    that was started anew; of a publication those of `Publication.seconds`, `rows` and `retention`."""
    began_at: float
    ended_at: float | None = None
    ended: str = ""
    """`proven`, `published`, `unproven`, `failed`, `cancelled` (nobody waited for it any more), `interrupted` (its
    process ended), `restarted`; empty while it goes on."""
    why: str = ""


class EngineLease(SQLModel, table=True):
    """Which run the engines serve; one row, `name` is always `engines`."""

    name: str = Field(primary_key=True)
    run: str
    since: float
