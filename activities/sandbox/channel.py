"""How the host runs a command inside a sandbox, at most once per key.

Owns the operation, its result and the conversation with sbxd over the unix socket in the sandbox's folder. Promises
that a key never runs twice: a call that finds the key running waits for it, one that finds it finished gets the same
result. No daemon is involved, so a command outlives its client and the Docker daemon. Called by `DockerBackend`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from workflows.errors import SandboxError

INSIDE = "/run/ratchet"
"""Mount points inside a sandbox; the image closes it to everybody but root, so no agent reaches what is below."""
BOX = f"{INSIDE}/box"
TOOLS = f"{INSIDE}/tools"
KILL_S = 2.0
"""A command is over this long after its time-out, whatever it does: the inside enforces it."""
SLACK_S = 4.0
"""What the host grants on top before it calls the sandbox silent."""

AGENT_UID = 1000
AGENT_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/work",
    "USER": "agent",
    "SHELL": "/bin/sh",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
TRUSTED_ENV = AGENT_ENV | {"PATH": f"{TOOLS}/bin:{AGENT_ENV['PATH']}", "HOME": "/root", "USER": "root"}


MOST_BYTES = 4 << 20
"""Of an answer or a journal's entry: some of those whom a sandbox belongs to could write more."""


class ChannelLost(Exception):
    """The sandbox's end did not answer: it is gone, or stopped. Internal: the backend finds out which."""


@dataclass(frozen=True)
class Person:
    """Who runs a command in a machine of its own, with what around."""

    uid: int
    gid: int
    env: dict[str, str]
    cwd: str
    shell: str = "/bin/bash"


@dataclass(frozen=True)
class Operation:
    """One command. Example: Operation(op_id="t3", command="ls", timeout_s=10)."""

    op_id: str
    command: str
    timeout_s: float
    root: bool = False
    """Setup and check run as root with a PATH that the agent can't touch; the agent's commands don't."""
    env: dict[str, str] = field(default_factory=dict)
    cwd: str = "/work"
    cap_bytes: int = 65536
    """Bytes of output that are kept: the first and the last half of it."""
    person: Person | None = None
    """Of a machine of its own, for all that is not trusted there; says who, where and in which shell."""

    @property
    def key(self) -> str:
        return key_of(self.op_id)

    @property
    def uid(self) -> int:
        return self.person.uid if self.person else 0 if self.root else AGENT_UID

    @property
    def gid(self) -> int:
        return self.person.gid if self.person else self.uid

    @property
    def folder(self) -> str:
        return self.person.cwd if self.person else self.cwd

    @property
    def shell(self) -> str:
        if self.person:
            return self.person.shell
        return f"{TOOLS}/bin/sh" if self.root else "/bin/sh"

    @property
    def text(self) -> str:
        """The command as a shell can get it: a NUL byte can't be passed and is dropped, as bash does."""
        return self.command.replace("\0", "")

    @property
    def environment(self) -> list[str]:
        around = self.person.env if self.person else TRUSTED_ENV if self.root else AGENT_ENV
        values = around | self.env
        return [f"{name}={value}".replace("\0", "") for name, value in values.items()]


@dataclass(frozen=True)
class Result:
    """How a command ended, as it was measured inside. `exit_code` None: a signal, the time-out, or never started."""

    exit_code: int | None
    signal: int | None
    timed_out: bool
    spawn_errno: int
    """Why it could not be started, 0 where it was."""
    seconds: float
    total_bytes: int
    head: bytes
    tail: bytes
    oom_kills: int = 0
    """Processes of this sandbox that the kernel killed for its memory limit while the command ran."""
    pids_hits: int = 0
    pids: int = 0
    pids_max: int = -1
    full: tuple[str, ...] = ()
    """File systems without a free block or inode when it ended."""
    replayed: bool = False


class Channel(Protocol):
    """Runs commands in one sandbox. All methods raise ChannelLost when the other end does not answer in time."""

    async def run(self, op: Operation) -> Result: ...

    async def ask(self, op_id: str, wait_s: float) -> Result | None:
        """The result of a key that was started, None for one that never was."""
        ...

    async def kill_agent(self) -> None:
        """Kill every process that the agent left."""
        ...

    async def ready(self, within_s: float = 1.0) -> None:
        """Whether the other end answers; one that is gone says so at once."""
        ...


def key_of(op_id: str) -> str:
    return hashlib.sha256(op_id.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def parse_result(data: bytes, *, replayed: bool) -> Result:
    """Raises ChannelLost for a result that was cut short."""
    line, _, output = data.partition(b"\n")
    fields = line.decode("ascii", "replace").split()
    if len(fields) != 13:
        raise ChannelLost(f"a result that can't be read: {line[:80]!r}")
    code, signal, timed_out, spawn_errno, ms, total, head, tail, oom, hits, pids, pids_max = map(int, fields[:12])
    if len(output) != head + tail:
        raise ChannelLost(f"a result of {len(output)} bytes instead of {head + tail}")
    return Result(
        exit_code=code if code >= 0 and not timed_out else None,
        signal=signal or None,
        timed_out=bool(timed_out),
        spawn_errno=spawn_errno,
        seconds=ms / 1000,
        total_bytes=total,
        head=output[:head],
        tail=output[head:],
        oom_kills=max(oom, 0),
        pids_hits=max(hits, 0),
        pids=pids,
        pids_max=pids_max,
        full=tuple(fields[12].split(",")) if fields[12] != "-" else (),
        replayed=replayed,
    )


def journaled(box: Path, op_id: str) -> Result | None:
    """The result that the journal of a sandbox holds, also when the sandbox is gone. Raises SandboxError (final) for
    one that can't be read: results appear whole, so a retry would find the same."""
    data = _read_entry(box / key_of(op_id))
    try:
        return parse_result(data, replayed=True) if data else None
    except ChannelLost as lost:
        raise SandboxError(f"the journal's result of {op_id}: {lost}", retryable=False) from lost


def _read_entry(path: Path) -> bytes:
    """Empty where there is none, and where there is something else than a file of a sensible size."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return file.read(MOST_BYTES)
    return b""


async def until_ready(channel: Channel, within_s: float) -> None:
    """Wait until the other end answers. Raises ChannelLost."""
    until = time.monotonic() + within_s
    while True:
        try:
            return await channel.ready()
        except ChannelLost:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.005)


class SocketChannel:
    """Speaks with sbxd. Stateless: every call connects afresh, so it does not matter which process called before."""

    def __init__(self, box: Path) -> None:
        self._box = box

    async def run(self, op: Operation) -> Result:
        environment = b"".join(item.encode("utf-8", "replace") + b"\0" for item in op.environment)
        payload = [op.shell.encode(), op.folder.encode(), environment, op.text.encode("utf-8", "replace")]
        sizes = " ".join(str(len(item)) for item in payload)
        head = f"RUN {op.key} {op.uid} {op.gid} {round(op.timeout_s * 1000)} {op.cap_bytes} {sizes}\n"
        reply = await self._call(head.encode() + b"".join(payload), op.timeout_s + KILL_S + SLACK_S)
        word, _, result = reply.partition(b"\n")
        if word not in (b"new", b"known"):
            raise ChannelLost(f"sbxd answered {word[:80]!r}")
        return parse_result(result, replayed=word == b"known")

    async def ask(self, op_id: str, wait_s: float) -> Result | None:
        word, _, result = (await self._call(f"ASK {key_of(op_id)}\n".encode(), wait_s + KILL_S + SLACK_S)).partition(
            b"\n"
        )
        return None if word == b"unknown" else parse_result(result, replayed=True)

    async def kill_agent(self) -> None:
        reply = await self._call(b"KILL\n", KILL_S + SLACK_S)
        if reply != b"killed 0\n":
            raise ChannelLost(f"processes outlived SIGKILL: {reply!r}")

    async def ready(self, within_s: float = 1.0) -> None:
        await self._call(b"PING\n", within_s)

    async def _call(self, request: bytes, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await self._connect()
                try:
                    writer.write(request)
                    return await _whole(reader)
                finally:
                    writer.close()
        except TimeoutError as error:
            raise ChannelLost(f"no answer within {timeout_s:.1f} s") from error
        except OSError as error:
            raise ChannelLost(f"socket: {error}") from error

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        # A socket's path may have 108 bytes and the state folder may be deep: go through a descriptor of its folder.
        folder = os.open(self._box, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return await asyncio.open_unix_connection(f"/proc/self/fd/{folder}/s")
        finally:
            os.close(folder)


async def _whole(reader: asyncio.StreamReader) -> bytes:
    """Raises ChannelLost for an answer that sbxd would never give."""
    found = b""
    while chunk := await reader.read(1 << 16):
        found += chunk
        if len(found) > MOST_BYTES:
            raise ChannelLost(f"an answer of more than {MOST_BYTES} bytes")
    return found
