"""What all tests share: a real S3 server, a fresh database, and the one stack of the end-to-end tests."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from sqlalchemy import Engine

from activities.sandbox import toolbox
from storage.database import open_database
from storage.migrations import migrate
from storage.objects import ObjectStore
from tests.postgres import PostgresServer, postgres_server
from tests.postgres import chosen as on_postgres
from tests.stack import stack as stack
from tests.stack import straight as straight

# Tests time nothing, on a machine that does something else as well, and draw the same examples each time, so that a run
# of CI says something of the change. HYPOTHESIS_PROFILE=explore draws new ones: for a search, at leisure.
_EACH_TIME = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("same", derandomize=True, **_EACH_TIME)
hypothesis.settings.register_profile("explore", max_examples=2000, **_EACH_TIME)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

LONGEST = (
    "test_ranks",
    "test_table",
    "test_weight_plans",
    "test_training_run",
    "test_resume",
    "test_outages",
    "test_align",
)
"""Files that begin first, so that no process is left alone with one at the end."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


S3 = tuple[str, str, str]
"""URL, access key and secret key of an S3 server."""


@contextmanager
def s3_server(root: Path) -> Iterator[tuple[S3, subprocess.Popen[bytes]]]:
    """A real `rclone serve s3` on a folder, to be used or killed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    access, secret = secrets.token_hex(8), secrets.token_hex(16)
    rclone = Path(sys.executable).with_name("rclone")
    server = subprocess.Popen(
        [rclone, "serve", "s3", "--addr", f"127.0.0.1:{port}", str(root)],
        env={**os.environ, "RCLONE_AUTH_KEY": f'"{access},{secret}"', "RCLONE_CONFIG": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield (f"http://127.0.0.1:{port}", access, secret), server
    server.terminate()
    server.wait(10)


def bucket_of(s3: S3) -> ObjectStore:
    """A fresh bucket."""
    endpoint, access, secret = s3
    store = ObjectStore.connect(
        endpoint=endpoint,
        bucket=f"test-{uuid.uuid4().hex[:12]}",
        region="us-east-1",
        access_key=access,
        secret_key=secret,
    )
    store.ensure_bucket()
    return store


GROUPS = {
    # What is one on a machine: the Docker daemon; and engines, each of which takes half a minute to start.
    **dict.fromkeys(("janitor", "outcomes", "sandbox"), "machine"),
    "generation": "engines",
    **dict.fromkeys(("replay", "workflows"), "temporal"),
    "training": "trainer",
    **dict.fromkeys(("bootstrap", "publication"), "publication"),
    # Made short, so that no process is left alone at the end.
    "workers": "workers",
    **dict.fromkeys(("lineage", "storage"), "records"),
}
"""What `make test` runs in one process, by folder; the other folders are another's."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadscope` a scope is a group of folders."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return GROUPS.get(nodeid.split("/")[1], "others")

    return ByFolder(config, log)


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What every sandbox is given is compiled once in a session, not for each fresh state folder: a second of a core
    each."""
    kept, lock, compile_here = tmp_path_factory.mktemp("compiled"), threading.Lock(), toolbox._compile

    def copy(folder: Path) -> None:
        with lock:
            if not toolbox.has_sbxd(kept):
                compile_here(kept)
        for program in kept.iterdir():
            shutil.copy(program, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolbox, "_compile", copy)
        yield


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """A real S3 server for the session."""
    with s3_server(tmp_path_factory.mktemp("s3")) as (s3, _):
        yield s3


@pytest.fixture
def object_store(s3_endpoint: S3) -> ObjectStore:
    """A fresh bucket of the session's S3 server."""
    return bucket_of(s3_endpoint)


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty SQLite file with the migrations applied, to copy."""
    path = tmp_path_factory.mktemp("database") / "empty.db"
    migrate(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def postgres_databases() -> Iterator[PostgresServer]:
    """Where RATCHET_TEST_DATABASE has the databases on PostgreSQL."""
    with postgres_server() as server:
        yield server


@pytest.fixture
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """A fresh SQLite file with the migrations applied, or a PostgreSQL database that is."""
    if on_postgres():
        server: PostgresServer = request.getfixturevalue("postgres_databases")
        url = server.fresh()
        engine = open_database(url)
        yield engine
        engine.dispose()
        server.drop(url)
        return
    path = shutil.copy(request.getfixturevalue("migrated"), tmp_path / "lineage.db")
    engine = open_database(f"sqlite:///{path}")
    yield engine
    engine.dispose()
