from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, inspect
from sqlmodel import SQLModel

import storage.tables  # noqa: F401  (registers the tables)
from storage.database import open_database
from storage.migrations import config, migrate

ROOT = Path(__file__).parents[2]


def test_the_migrations_make_exactly_the_tables_of_the_code(database: Engine) -> None:
    with database.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, SQLModel.metadata) == []
    command.check(config(str(database.url)))


def test_the_migrations_read_as_sql_for_postgresql_without_a_server() -> None:
    with redirect_stdout(io.StringIO()) as out:
        made = config("postgresql://nobody@nowhere/none")
        made.output_buffer = out
        command.upgrade(made, "head", sql=True)
    sql = out.getvalue()
    for table in SQLModel.metadata.tables:
        assert f"CREATE TABLE {table} " in sql or f'CREATE TABLE "{table}" ' in sql
    assert "PRIMARY KEY (episode)" in sql and "CREATE UNIQUE INDEX batch_run_step" in sql


def test_migrating_again_changes_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'x.db'}"
    migrate(url)
    before = (tmp_path / "x.db").read_bytes()
    migrate(url)
    assert (tmp_path / "x.db").read_bytes() == before


def test_two_processes_may_migrate_one_database_at_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    argv = [sys.executable, "-c", f"from storage.migrations import migrate; migrate({url!r})"]
    started = [
        subprocess.Popen(argv, cwd=ROOT, env=dict(os.environ), stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    errors = [process.communicate(timeout=60)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors
    engine = open_database(url)
    assert set(SQLModel.metadata.tables) < set(inspect(engine).get_table_names())
    engine.dispose()
