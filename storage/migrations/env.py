"""Alembic's environment: the tables' metadata, online or as SQL."""

from __future__ import annotations

from alembic import context
from sqlalchemy import NullPool, create_engine
from sqlmodel import SQLModel

import storage.tables  # noqa: F401  (registers the tables)

LOCK = 7218234
"""Key of the advisory lock under which one process migrates a PostgreSQL database."""

url = context.config.get_main_option("sqlalchemy.url") or ""

if context.is_offline_mode():
    context.configure(url=url, target_metadata=SQLModel.metadata, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
else:
    with create_engine(url, poolclass=NullPool).connect() as connection:
        context.configure(connection=connection, target_metadata=SQLModel.metadata, render_as_batch=True)
        with context.begin_transaction():
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({LOCK})")
            context.run_migrations()
