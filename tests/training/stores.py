"""A real S3 server (rclone) for the tests of training and publication."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from storage.objects import ObjectStore
from tests.training.worlds import SEGMENTS
from workflows.errors import StorageError

RCLONE = Path(sys.executable).parent / "rclone"


class OnceForAll(ObjectStore):
    """A real store, of which the objects below `prefix` are written once and read once: hundreds of updates have the
    same segments."""

    prefix = f"{SEGMENTS}/"

    def __init__(self, client: Any, bucket: str) -> None:
        super().__init__(client, bucket)
        self.written: set[str] = set()
        self.read: dict[str, bytes] = {}

    def put(self, key: str, data: bytes) -> None:
        if key not in self.written:
            super().put(key, data)
        if key.startswith(self.prefix):
            self.written.add(key)

    def get(self, key: str) -> bytes:
        if key not in self.read:
            data = super().get(key)
            if not key.startswith(self.prefix):
                return data
            self.read[key] = data
        return self.read[key]


@contextmanager
def serving_s3(folder: Path) -> Iterator[dict[str, str]]:
    """Arguments of ObjectStore.connect for a store whose content is `folder/test`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    access, secret = secrets.token_hex(8), secrets.token_hex(16)
    (folder / "test").mkdir(parents=True)
    argv = [str(RCLONE), "serve", "s3", "--addr", address, "--auth-key", f"{access},{secret}", str(folder)]
    server = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        arguments = {
            "endpoint": f"http://{address}",
            "bucket": "test",
            "region": "us-east-1",
            "access_key": access,
            "secret_key": secret,
        }
        _await(ObjectStore.connect(**arguments))
        yield arguments
    finally:
        server.terminate()
        server.wait(10)


def _await(store: ObjectStore) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            store.put("probe", b"")
            return
        except StorageError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
