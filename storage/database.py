"""Opening the lineage database: SQLite on one box, PostgreSQL by URL.

SQLite gets WAL, a busy timeout, foreign keys and BEGIN IMMEDIATE: a deferred transaction that reads and then writes
fails under concurrent writers whatever the timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Engine, event, func
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, NotSupportedError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlmodel import Session, create_engine, select

from workflows.errors import StorageError

Result = TypeVar("Result")
MOST_CONNECTIONS = 40
"""Above the threads that asyncio.to_thread gives a worker, so that no activity waits for another's connection."""


def with_driver(url: str) -> str:
    """`postgresql://` and `postgres://` mean psycopg, the driver that Ratchet brings."""
    scheme, mark, rest = url.partition("://")
    return f"postgresql+psycopg{mark}{rest}" if scheme in ("postgresql", "postgres") else url


def open_database(url: str) -> Engine:
    """An engine for `url`; the schema is brought up by storage/migrations, not here."""
    url = with_driver(url)
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


def one_at_a_time(opened: Session, name: str) -> None:
    """Until its transaction ends, no other that names the same is beyond this call: what is read now stays true.

    SQLite's transactions always go one at a time."""
    if opened.get_bind().dialect.name == "postgresql":
        opened.exec(select(func.pg_advisory_xact_lock(func.hashtext(name))))


@contextmanager
def session(engine: Engine) -> Iterator[Session]:
    """One short transaction. Database failures come out as StorageError, final for what is wrong with the statement."""
    try:
        with Session(engine, expire_on_commit=False) as opened:
            yield opened
            opened.commit()
    except DBAPIError as error:
        final = isinstance(error, DataError | IntegrityError | NotSupportedError | ProgrammingError)
        raise StorageError(f"database: {error.orig}", retryable=not final) from error
    except PoolTimeout as error:
        raise StorageError(f"database: {error}") from error


async def in_transaction(engine: Engine, work: Callable[[Session], Result]) -> Result:
    """What `work` returns, in one short transaction, in a thread: for event loops. Raises as `session`."""

    def transaction() -> Result:
        with session(engine) as opened:
            return work(opened)

    return await asyncio.to_thread(transaction)
