"""Opening the lineage to read only: one session sees one moment, writes nothing, and holds up no writer.

For commands that read much of a run which goes on meanwhile; storage/database.py opens it for those who write.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, event
from sqlmodel import create_engine

from storage.database import with_driver


def open_to_read(url: str) -> Engine:
    """An engine for `url`, whose database exists."""
    url = with_driver(url)
    if not url.startswith("sqlite"):
        engine = create_engine(url, pool_pre_ping=True)
        return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    engine = create_engine(url, connect_args={"timeout": 30, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def _pragmas(connection: Any, _: Any) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA query_only=ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine
