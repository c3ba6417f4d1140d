"""What all tests share: a real S3 server and a fresh database."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from storage.database import open_database
from storage.migrations import migrate
from storage.objects import ObjectStore


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str]]:
    """(URL, access key, secret key) of a real `rclone serve s3` for the session."""
    root = tmp_path_factory.mktemp("s3")
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
    yield f"http://127.0.0.1:{port}", access, secret
    server.terminate()
    server.wait(10)


@pytest.fixture
def object_store(s3_endpoint: tuple[str, str, str]) -> ObjectStore:
    """A fresh bucket of the session's S3 server."""
    endpoint, access, secret = s3_endpoint
    store = ObjectStore.connect(
        endpoint=endpoint,
        bucket=f"test-{uuid.uuid4().hex[:12]}",
        region="us-east-1",
        access_key=access,
        secret_key=secret,
    )
    store.ensure_bucket()
    return store


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty SQLite file with the migrations applied, to copy."""
    path = tmp_path_factory.mktemp("database") / "empty.db"
    migrate(f"sqlite:///{path}")
    return path


@pytest.fixture
def database(tmp_path: Path, migrated: Path) -> Iterator[Engine]:
    """A fresh SQLite file with the migrations applied."""
    path = shutil.copy(migrated, tmp_path / "lineage.db")
    engine = open_database(f"sqlite:///{path}")
    yield engine
    engine.dispose()
