"""One build by the daemon's classic builder, which needs no registry of its own.

Owns the conversation: the context goes up, lines come down, and a step that fails is named with what it said. Called by
`TaskImages`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any

from activities.sandbox.daemon import Daemon, Refused
from activities.sandbox.machines.context import write_context
from tasksets.base import ImageSource
from workflows.errors import SandboxError

MEMORY_MB = 4096
CPUS = 2
"""Of one build."""
PERIOD_US = 100_000
SAID = 6
"""Lines of a failed step that are told."""
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


class Progress:
    """What a build says, line by line."""

    def __init__(self) -> None:
        self.step = "the build"
        self.error = ""
        self.said: deque[str] = deque(maxlen=SAID)
        self._rest = ""

    def take(self, line: bytes) -> None:
        """One message of the daemon; what a step prints comes in pieces."""
        try:
            message = json.loads(line)
        except ValueError:
            return
        self.error = self.error or str(message.get("error", ""))
        *lines, self._rest = (self._rest + _COLOURS.sub("", str(message.get("stream", "")))).split("\n")
        for text in lines:
            if text.startswith("Step "):
                self.step = text
                self.said.clear()
            elif text.strip() and not text.startswith((" ---> ", "Removing intermediate")):
                self.said.append(text.strip())

    def words(self) -> str:
        """What failed. Example: `Step 2/3 : RUN false: The command ... returned a non-zero code: 1`."""
        return "; ".join([f"{self.step}: {self.error}", *self.said, *filter(None, [self._rest.strip()])])


async def build(
    daemon: Daemon, source: ImageSource, dockerfile: str, tag: str, labels: dict[str, str], archive: IO[bytes]
) -> None:
    """Build `tag`. Raises SandboxError, final for a step that fails or lasts too long."""
    await asyncio.to_thread(write_context, Path(source.context), source.dockerfile, dockerfile, archive)
    parameters = {
        "t": tag,
        "dockerfile": source.dockerfile,
        "buildargs": json.dumps(source.args),
        "labels": json.dumps(labels),
        "rm": "1",
        "forcerm": "1",
        "memory": str(MEMORY_MB << 20),
        "memswap": str(MEMORY_MB << 20),
        "cpuperiod": str(PERIOD_US),
        "cpuquota": str(CPUS * PERIOD_US),
    }
    progress = Progress()

    async def post(client: Any) -> None:
        headers = {"Content-Type": "application/x-tar"}
        data = pieces(archive)
        async with client._query("build", "POST", params=parameters, data=data, headers=headers, timeout=None) as reply:
            rest = b""
            async for chunk in reply.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    progress.take(line)
            progress.take(rest)

    try:
        async with asyncio.timeout(source.timeout_s):
            await daemon.call("build", post, queued=False, limit_s=source.timeout_s + 60)
    except TimeoutError as error:
        words = f"{progress.step}: not done within {source.timeout_s:.0f} s, the limit of the build"
        raise SandboxError(words, retryable=False) from error
    except Refused as refused:
        # What the builder can't read at all is refused before the first step.
        raise SandboxError(str(refused), retryable=refused.status >= 500 and not progress.error) from refused
    if progress.error:
        raise SandboxError(progress.words(), retryable=False)


async def pieces(archive: IO[bytes]) -> AsyncIterator[bytes]:
    """A file from its beginning, as a request's body; the client would close a file that it was given itself."""
    archive.seek(0)
    while piece := await asyncio.to_thread(archive.read, 1 << 20):
        yield piece
