"""Databases with a run in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Engine

from storage.database import session
from tests.storage.made_run import MadeRun

MakeRun = Callable[..., str]


@pytest.fixture
def make_run(database: Engine) -> MakeRun:
    """Writes a run into the database; its id."""

    def make(**fields: object) -> str:
        with session(database) as opened:
            made = MadeRun(opened, **fields)  # type: ignore[arg-type]
            made.write()
        return made.run

    return make
