"""Bringing a database's schema up to date. Called once by `ratchet up`, and by tests; needs no alembic.ini.

Several processes may call it at once: a lock file beside an SQLite file, or an advisory lock of PostgreSQL, lets one
go first.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from filelock import FileLock

from storage.database import open_database, with_driver

HERE = Path(__file__).parent


def config(url: str) -> Config:
    """Alembic's configuration for `url`."""
    made = Config()
    made.set_main_option("script_location", str(HERE))
    made.set_main_option("sqlalchemy.url", with_driver(url).replace("%", "%%"))
    return made


def migrate(url: str) -> None:
    """Bring the schema to its newest revision; nothing happens where it is there."""
    if not url.startswith("sqlite:///"):
        command.upgrade(config(url), "head")
        return
    path = Path(url.removeprefix("sqlite:///"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(path.name + ".migrate.lock")):
        open_database(url).dispose()
        command.upgrade(config(url), "head")
