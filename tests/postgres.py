"""A PostgreSQL server of the tests' own, on a socket in a folder that goes with it."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from storage.migrations import migrate

CHOICE = "RATCHET_TEST_DATABASE"
"""`postgresql` has the tests' databases on such a server instead of SQLite."""
EMPTY = "empty"


def chosen() -> bool:
    return os.environ.get(CHOICE, "") == "postgresql"


def missing() -> str:
    """What keeps this machine from starting one; empty where nothing does."""
    if not shutil.which("postgres") or not shutil.which("initdb"):
        return "no PostgreSQL server on this machine"
    return "" if _user() else "PostgreSQL refuses to run as root, and there is no user postgres"


def _user() -> str | None:
    if os.getuid() != 0:
        return pwd.getpwuid(os.getuid()).pw_name
    return "postgres" if any(entry.pw_name == "postgres" for entry in pwd.getpwall()) else None


class PostgresServer:
    """Makes databases. `folder` holds the socket."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._migrated = False

    def url(self, name: str = "postgres") -> str:
        return f"postgresql://ratchet@/{name}?host={self._folder}"

    def answers(self) -> bool:
        """Its socket is there before it takes anybody."""
        try:
            self._run("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def fresh(self) -> str:
        """The URL of a new database with the migrations applied."""
        if not self._migrated:
            self._create(EMPTY)
            migrate(self.url(EMPTY))
            self._migrated = True
        name = f"test_{next(self._numbers)}"
        self._create(name, template=EMPTY)
        return self.url(name)

    def copy(self, source: str, url: str) -> None:
        """Put what `source` holds in the place of `url`. Nobody may be connected to either."""
        self.drop(url)
        self._create(_name(url), template=_name(source))

    def drop(self, url: str) -> None:
        """Remove a database, whoever is still connected."""
        self._run(f"DROP DATABASE {_name(url)} WITH (FORCE)")

    def _create(self, name: str, template: str = "template0") -> None:
        self._run(f"CREATE DATABASE {name} TEMPLATE {template}")

    def _run(self, statement: str) -> None:
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(statement.encode())


def _name(url: str) -> str:
    return url.partition("@/")[2].partition("?")[0]


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A fresh server, ended and removed with the block. Asks for what `missing` looks at."""
    user, initdb, program = _user(), shutil.which("initdb"), shutil.which("postgres")
    assert user and initdb and program, missing()
    folder = Path(tempfile.mkdtemp(prefix="ratchet-pg-"))
    shutil.chown(folder, user)
    subprocess.run(
        [initdb, "-D", folder / "data", "-A", "trust", "-U", "ratchet", "-N"],
        user=user,
        check=True,
        capture_output=True,
    )
    server = subprocess.Popen(
        [program, "-D", folder / "data", "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off"],
        user=user,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        made = PostgresServer(folder)
        deadline = time.monotonic() + 30
        while not made.answers():
            assert time.monotonic() < deadline and server.poll() is None
            time.sleep(0.05)
        yield made
    finally:
        server.send_signal(signal.SIGINT)  # ends open sessions, which SIGTERM waits for
        server.wait(30)
        shutil.rmtree(folder)
