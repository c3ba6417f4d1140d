"""Opening the lineage database: SQLite on one box, PostgreSQL by URL.

SQLite gets WAL, a busy timeout, foreign keys and BEGIN IMMEDIATE: a deferred transaction that reads and then writes
fails under concurrent writers whatever the timeout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlmodel import Session, create_engine

from workflows.errors import StorageError

MOST_CONNECTIONS = 40
"""Above the threads that asyncio.to_thread gives a worker, so that no activity waits for another's connection."""


def open_database(url: str) -> Engine:
    """An engine for `url`; the schema is brought up by storage/migrations, not here."""
    if not url.startswith("sqlite"):
        return create_engine(url, pool_pre_ping=True, max_overflow=MOST_CONNECTIONS)
    if path := url.removeprefix("sqlite:///"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, connect_args={"timeout": 30, "check_same_thread": False}, max_overflow=MOST_CONNECTIONS)

    @event.listens_for(engine, "connect")
    def _pragmas(connection: Any, _: Any) -> None:
        connection.isolation_level = None
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=30000", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


@contextmanager
def session(engine: Engine) -> Iterator[Session]:
    """One short transaction. Database failures come out as StorageError."""
    try:
        with Session(engine, expire_on_commit=False) as opened:
            yield opened
            opened.commit()
    except DBAPIError as error:
        raise StorageError(f"database: {error.orig}") from error
    except PoolTimeout as error:
        raise StorageError(f"database: {error}") from error
