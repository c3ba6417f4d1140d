"""What tasks' setups leave, kept on this host: `<state>/snapshots/<key>.snapshot`, or `<key>.refused` with the reason.

Owns the files, who may make one (one preparation at a time per key, over all processes of this host) and how long they
stay. The key is a hash over all that the content depends on, so a file is never changed. Files appear whole. Called by
`Preparation` and by the janitor.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

MOST_BYTES = 2 << 30
"""Of all snapshots of a host together."""
MOST_AGE_S = 24 * 3600.0
"""Since it was used last."""
LOOK_S = 0.02


class Snapshots:
    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, key: str) -> Path:
        return self._root / f"{key}.snapshot"

    def has(self, key: str) -> bool:
        return self.path(key).is_file()

    def refused(self, key: str) -> str:
        """Why the setup can't be kept; empty where that is not known of it."""
        with suppress(FileNotFoundError):
            return self._refusal(key).read_text()
        return ""

    def add(self, key: str, archive: Path) -> None:
        """Take the file over."""
        archive.replace(self.path(key))
        self.sweep()

    def refuse(self, key: str, why: str) -> None:
        fresh = self._root / f"{key}.{os.getpid()}.part"
        fresh.write_text(why or "no reason was given")
        fresh.replace(self._refusal(key))

    def link(self, key: str, target: Path) -> bool:
        """Give out the snapshot under another name, without a copy; False where it is gone. It counts as used."""
        target.unlink(missing_ok=True)
        try:
            os.utime(self.path(key))
            target.hardlink_to(self.path(key))
        except FileNotFoundError:
            return False
        return True

    def drop(self, key: str) -> None:
        self.path(key).unlink(missing_ok=True)

    def sweep(self) -> int:
        """Remove what was not used for long, and the least used beyond the bound; how many files."""
        now, left, count = time.time(), MOST_BYTES, 0
        found = []
        for path in self._root.glob("*"):
            with suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        for used, size, path in sorted(found, reverse=True):
            left -= size
            # Whoever holds a lock that old is dead, or has been waiting for nothing.
            if now - used > MOST_AGE_S or (left < 0 and path.suffix == ".snapshot"):
                path.unlink(missing_ok=True)
                count += 1
        return count

    @asynccontextmanager
    async def alone(self, key: str) -> AsyncIterator[None]:
        """No other process of this host is in this block for the same key. Its holder's death ends it."""
        await asyncio.to_thread(self._root.mkdir, parents=True, exist_ok=True)
        descriptor = os.open(self._root / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(LOOK_S)
            yield
        finally:
            os.close(descriptor)

    def _refusal(self, key: str) -> Path:
        return self._root / f"{key}.refused"
