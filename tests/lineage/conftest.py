from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from sqlalchemy import Engine

from storage.database import open_database, session
from tests.postgres import PostgresServer
from tests.storage.conftest import make_run
from tests.storage.made_run import MadeRun

__all__ = ["make_run"]


@pytest.fixture
def home(database: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder that commands are told of, not made yet; its database is the test's."""
    folder = tmp_path / "home"
    monkeypatch.setenv("RATCHET_HOME", str(folder))
    monkeypatch.setenv("RATCHET_DATABASE_URL", str(database.url))
    return folder


@pytest.fixture(scope="session")
def healthy_file(tmp_path_factory: pytest.TempPathFactory, migrated: Path) -> Path:
    """A database with the whole made run, without a mishap; to copy."""
    path = Path(shutil.copy(migrated, tmp_path_factory.mktemp("healthy") / "lineage.db"))
    engine = open_database(f"sqlite:///{path}")
    with session(engine) as opened:
        MadeRun(opened, mishaps=False).write()
    engine.dispose()
    return path


@pytest.fixture(scope="session")
def healthy_copy(postgres_databases: PostgresServer) -> str:
    """The URL of a database as `healthy_file`; to copy."""
    url = postgres_databases.fresh()
    engine = open_database(url)
    with session(engine) as opened:
        MadeRun(opened, mishaps=False).write()
    engine.dispose()
    return url


@pytest.fixture
def healthy(home: Path, database: Engine, request: pytest.FixtureRequest) -> str:
    """The run of `healthy_file` in the test's own database."""
    database.dispose()
    if database.dialect.name == "sqlite":
        shutil.copy(request.getfixturevalue("healthy_file"), str(database.url.database))
    else:
        source: str = request.getfixturevalue("healthy_copy")
        server: PostgresServer = request.getfixturevalue("postgres_databases")
        server.copy(source, server.url(str(database.url.database)))
    return MadeRun.run
