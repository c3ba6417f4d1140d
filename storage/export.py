"""A run's rows as Parquet, one file per table, and its metrics as TensorBoard event files.

An export appears whole or not at all: it is made apart from its place and moved there, `export.json` last. Schemas are
the tables' own, also of a table without a row; JSON columns are strings of JSON. Called by `ratchet export`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import sqlalchemy
from sqlalchemy import JSON, ColumnElement, Table, TypeDecorator
from sqlmodel import Session, SQLModel, select

from storage import queries
from storage.tables import Episode, Group
from storage.tensorboard import write_scalars
from workflows.errors import InvalidConfig, StorageError

MANIFEST = "export.json"
SCALARS = "tensorboard"
ROWS_AT_ONCE = 5000
TYPES = {bool: pyarrow.bool_(), int: pyarrow.int64(), float: pyarrow.float64(), str: pyarrow.string()}


def export_run(
    opened: Session, *, run: str, to: Path, force: bool = False, tensorboard: bool = False
) -> dict[str, int]:
    """Write the run into the folder `to`; rows by table. `force`: over what another export left there.

    Raises NotFound, InvalidConfig for a folder that is not empty, StorageError where it can't be written."""
    row, to = queries.run_row(opened, run=run), to.resolve()
    _refuse(to, force)
    counts: dict[str, int] = {}
    with _whole(to) as folder:
        for table in tables():
            counts[table.name] = _write(opened, table, run, folder / f"{table.name}.parquet")
        if tensorboard:
            write_scalars(opened, run=run, folder=folder / SCALARS)
        told = {"run": run, "state": row.state, "exported_at": time.time(), "rows": counts}
        (folder / MANIFEST).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return counts


def tables() -> list[Table]:
    """All tables of the lineage, in the order of their names."""
    return sorted(SQLModel.metadata.tables.values(), key=lambda table: table.name)


def schema_of(table: Table) -> pyarrow.Schema:
    """Columns in the table's own order. A JSON column is a string whose field says `json` in its metadata."""
    return pyarrow.schema([_field(column) for column in table.columns])


def _field(column: sqlalchemy.Column[Any]) -> pyarrow.Field:
    if isinstance(column.type, JSON):
        return pyarrow.field(column.name, pyarrow.string(), nullable=bool(column.nullable), metadata={"type": "json"})
    # SQLModel's strings are a decorator of SQLAlchemy's.
    kind = column.type.impl_instance if isinstance(column.type, TypeDecorator) else column.type
    return pyarrow.field(column.name, TYPES[kind.python_type], nullable=bool(column.nullable))


def rows_of(table: Table, run: str) -> ColumnElement[bool]:
    """Which rows of the table are the run's: those that name it, or belong to a row that does."""
    if table.name == "run":
        return table.c.id == run
    if "run" in table.c:
        return table.c.run == run
    if table.name == "task":
        met = select(Episode.task).where(Episode.run == run).union(select(Group.task).where(Group.run == run))
        return table.c.id.in_(met)
    for key in table.foreign_keys:
        owner = key.column.table
        if "run" in owner.c:
            return key.parent.in_(sqlalchemy.select(key.column).where(owner.c.run == run))
    raise StorageError(f"the rows of table {table.name} can't be told apart by run", retryable=False)


def _write(opened: Session, table: Table, run: str, path: Path) -> int:
    """The table's rows in the order of their keys; how many."""
    schema, count = schema_of(table), 0
    documents = {column.name for column in table.columns if isinstance(column.type, JSON)}
    statement = sqlalchemy.select(table).where(rows_of(table, run)).order_by(*table.primary_key.columns)
    rows = opened.connection().execute(statement, execution_options={"yield_per": ROWS_AT_ONCE})
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for part in rows.mappings().partitions(ROWS_AT_ONCE):
            columns = {name: [row[name] for row in part] for name in schema.names}
            for name in documents:
                columns[name] = [None if value is None else _json(value) for value in columns[name]]
            writer.write_table(pyarrow.table(columns, schema=schema))
            count += len(part)
    return count


def _json(value: Any) -> str:
    """Without what JSON does not have: a number that is not finite is null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None), sort_keys=True)


def _refuse(to: Path, force: bool) -> None:
    if to.exists() and not to.is_dir():
        raise InvalidConfig(f"{to} is not a folder")
    if to.is_dir() and any(to.iterdir()) and not force:
        raise InvalidConfig(f"{to} is not empty; with --force the files of an earlier export there are replaced")


@contextmanager
def _whole(to: Path) -> Iterator[Path]:
    """A folder to write in, whose content is in `to` afterwards; nothing of it is, where writing fails."""
    try:
        # Inside of a folder that exists: it may be a file system of its own.
        beside = to if to.is_dir() else to.parent
        beside.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=f".{to.name}.", dir=beside))
        try:
            making.chmod(0o755)
            yield making
            _place(making, to)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    except OSError as error:
        raise StorageError(f"{to} can't be written: {error}", retryable=False) from error


def _place(making: Path, to: Path) -> None:
    if not to.is_dir():
        making.rename(to)
        return
    # Without its manifest what is there is no export, should this end half-way.
    (to / MANIFEST).unlink(missing_ok=True)
    if (to / SCALARS).is_dir():
        shutil.rmtree(to / SCALARS)
    for path in sorted(making.iterdir(), key=lambda path: (path.name == MANIFEST, path.name)):
        os.replace(path, to / path.name)
