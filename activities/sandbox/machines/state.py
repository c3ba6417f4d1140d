"""The state that an agent left in its machine: stopped from outside, listed, compared, read and kept.

Owns the daemon's side of it. All of it works on a container that does not run any more, so nothing of the agent's can
answer, wait or change its mind; what is read is bounded. Called by `Examiner`.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import hashlib
import io
import json
import stat
import tarfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from activities.sandbox.boxes import Boxes
from activities.sandbox.daemon import Daemon, tolerated
from activities.sandbox.evidence import SandboxGone
from activities.sandbox.machines.changes import Change, Kind
from workflows.errors import SandboxError

REPOSITORY = "ratchet/answer"
ANSWER = "ratchet.answer"
"""Label of such an image: the container of which it was made."""
STOP_S = 15.0
MOST_BYTES = 256 << 20
"""Of one archive."""
SLOW_S = 300.0
FOLDER = 1 << 31
"""Go's bit for a folder in a file's mode."""


LINK = 1 << 27
NO_FILE = FOLDER | LINK | 1 << 19 | 1 << 21 | 1 << 24 | 1 << 25 | 1 << 26
"""Of whatever is no ordinary file."""


@dataclass(frozen=True)
class Stat:
    """`mode` in Go's bits."""

    mode: int = 0
    size: int = 0
    there: bool = False

    @property
    def is_file(self) -> bool:
        return self.there and not self.mode & NO_FILE


class TooMuch(Exception):
    """The agent left more than is read."""


class State:
    """Of one sandbox's container."""

    def __init__(self, daemon: Daemon, boxes: Boxes, sandbox_id: str) -> None:
        self._daemon = daemon
        self._container = boxes.container(sandbox_id)
        self._labels = boxes.labels(sandbox_id) | {"ratchet.kind": "grader"}

    async def halt(self) -> None:
        """Kill all that runs in it, at once and from outside. Raises SandboxGone where there is no container."""
        with tolerated(404, 409):
            await self._daemon.call("kill", lambda client: client.containers.container(self._container).kill())
        until = time.monotonic() + STOP_S
        while (await self._show())["State"]["Running"]:
            if time.monotonic() > until:
                raise SandboxError(f"container {self._container} was killed and still runs")
            await asyncio.sleep(0.05)

    async def changes(self) -> list[Change]:
        """What differs from its image."""
        found = await self._daemon.call("changes", self._get_json("changes"), queued=False, limit_s=SLOW_S)
        return [Change(str(item["Path"]), Kind(item["Kind"])) for item in found or []]

    async def is_folder(self, path: str) -> bool:
        """Whether it is one itself, and no link to one; False where nothing is there."""
        return bool((await self.look(path)).mode & FOLDER)

    async def is_link(self, path: str) -> bool:
        return bool((await self.look(path)).mode & LINK)

    async def look(self, path: str) -> Stat:
        """At the path itself, without what is in it."""

        async def head(client: Any) -> str:
            url = f"containers/{self._container}/archive"
            try:
                async with client._query(url, "HEAD", params={"path": path}) as reply:
                    return str(reply.headers.get("X-Docker-Container-Path-Stat", ""))
            except json.JSONDecodeError:
                # The client reads a refusal from the body, and a HEAD has none.
                return ""

        with tolerated(404):
            if said := await self._daemon.call("stat", head):
                found = json.loads(base64.b64decode(said))
                return Stat(int(found["mode"]), int(found["size"]), there=True)
            if await self.archive(path) is not None:
                raise SandboxError(f"the daemon does not say what {path} is")
        return Stat()

    async def archive(self, path: str) -> bytes | None:
        """A path and all below it as a tar; None where nothing is there. Raises TooMuch."""

        async def get(client: Any) -> bytes:
            url, found = f"containers/{self._container}/archive", io.BytesIO()
            async with client._query(url, params={"path": path}, timeout=None) as reply:
                async for chunk in reply.content.iter_any():
                    found.write(chunk)
                    if found.tell() > MOST_BYTES:
                        # A stream that nobody reads on would hold up every other call on this container.
                        reply.close()
                        raise TooMuch(f"{path} has more than {MOST_BYTES >> 20} MiB")
            return found.getvalue()

        with tolerated(404):
            return await self._daemon.call("read", get, queued=False, limit_s=SLOW_S)
        return None

    async def put(self, folder: str, archive: bytes) -> None:
        """Write a tar's content below a folder."""
        await self._daemon.call(
            "write",
            lambda client: client.containers.container(self._container).put_archive(folder, archive),
            queued=False,
            limit_s=SLOW_S,
        )

    async def keep(self) -> str:
        """Its files as an image, until `forget`; the image's id."""
        # The tag would leave the image of a try that was cut short.
        await self.forget()
        made = await self._daemon.call(
            "commit",
            lambda client: client.containers.container(self._container).commit(
                repository=REPOSITORY, tag=self._container, changes=[f"LABEL {ANSWER}={self._container}"]
            ),
            queued=False,
            limit_s=SLOW_S,
        )
        return str(made["Id"])

    async def forget(self) -> None:
        """Remove the image that `keep` made. Idempotent."""
        await forget(self._daemon, self._container)

    @asynccontextmanager
    async def pristine(self) -> AsyncIterator[State]:
        """The files of its image, as a container that never runs and is gone afterwards."""
        shown = await self._show()
        twin = copy.copy(self)
        twin._container = f"{self._container}-pristine"
        config = {"Image": shown["Image"], "Cmd": ["true"], "Labels": self._labels, "NetworkDisabled": True}
        try:
            with tolerated(409):  # of a try that was cut short
                await self._daemon.call(
                    "create", lambda client: client.containers.create(config, name=twin._container), create=True
                )
            yield twin
        finally:
            with tolerated(404, 409):
                await self._daemon.call(
                    "remove",
                    lambda client: client.containers.container(twin._container).delete(force=True, v=True),
                )

    async def _show(self) -> dict[str, Any]:
        """Raises SandboxGone."""
        with tolerated(404):
            shown: dict[str, Any] = await self._daemon.call(
                "inspect", lambda client: client.containers.container(self._container).show()
            )
            return shown
        raise SandboxGone("the container was removed")

    def _get_json(self, what: str) -> Any:
        async def get(client: Any) -> Any:
            return await client._query_json(f"containers/{self._container}/{what}", timeout=None)

        return get


async def forget(daemon: Daemon, container: str) -> None:
    """Remove what was kept of that container. Idempotent."""
    with tolerated(404, 409):
        await daemon.call(
            "remove image", lambda client: client.images.delete(f"{REPOSITORY}:{container}", force=True, noprune=False)
        )
    filters = json.dumps({"dangling": ["true"], "label": [f"{ANSWER}={container}"]})
    with tolerated(409):  # another is pruning
        await daemon.call(
            "prune", lambda client: client._query_json("images/prune", "POST", params={"filters": filters})
        )


def fingerprint(archive: bytes | None) -> str:
    """What of a path matters to who runs it: kind, mode, content or target. Folders are folders, whatever is in them;
    empty where nothing is there."""
    if archive is None:
        return ""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        entry = tar.next()
        if entry is None:
            return ""
        if entry.isdir():
            return "folder"
        if not entry.isreg():
            return f"{entry.type!r} {entry.linkname}"
        content = tar.extractfile(entry)
        assert content is not None
        digest = hashlib.file_digest(content, "sha256").hexdigest()  # type: ignore[arg-type]
        return f"{stat.filemode(entry.mode)} {entry.uid} {entry.gid} {digest}"


def relocated(archive: bytes, path: str) -> bytes:
    """The archive of one path as that of another, to be written below the root."""
    target = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(archive)) as source, tarfile.open(fileobj=target, mode="w") as tar:
        for entry in source:
            if entry.isdev():
                continue
            entry.name = _moved(entry.name, path)
            if entry.islnk():
                entry.linkname = _moved(entry.linkname, path)
            tar.addfile(entry, source.extractfile(entry) if entry.isreg() else None)
    return target.getvalue()


def _moved(name: str, path: str) -> str:
    """Example: _moved("out/a", "/app/result") == "app/result/a"."""
    _, slash, rest = name.partition("/")
    return path.strip("/") + slash + rest
