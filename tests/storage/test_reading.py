from __future__ import annotations

import pytest
from sqlalchemy import Engine, text
from sqlmodel import select

from storage.database import session
from storage.reading import open_to_read
from storage.tables import Run
from tests.storage import rows
from workflows.errors import StorageError


def test_a_long_read_holds_up_no_writer_and_sees_one_moment(database: Engine) -> None:
    with session(database) as opened:
        rows.put_run(opened, "before")
    reader = open_to_read(str(database.url))
    with session(reader) as reading:
        assert reading.exec(select(Run.id)).all() == ["before"]
        with session(database) as opened:
            if database.dialect.name == "sqlite":
                opened.execute(text("PRAGMA busy_timeout=1"))
            else:
                opened.execute(text("SET lock_timeout = 1"))
            rows.put_run(opened, "after")
        assert reading.exec(select(Run.id)).all() == ["before"]
    with session(reader) as reading:
        assert sorted(reading.exec(select(Run.id)).all()) == ["after", "before"]
    reader.dispose()


def test_what_is_opened_to_read_is_not_written(database: Engine) -> None:
    reader = open_to_read(str(database.url))
    with pytest.raises(StorageError, match=r"read-?only"), session(reader) as reading:
        rows.put_run(reading)
    reader.dispose()
