"""The channel for machines where sbxd can't be built: `docker exec` starts run.sh, which keeps the result as a file.

Promises the same as `SocketChannel` (a key runs at most once, the result outlives the client), but every start needs
the daemon and costs some 70 ms; run.sh says where else it is weaker. Called by `DockerBackend`.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from activities.sandbox.channel import (
    AGENT_UID,
    KILL_S,
    SLACK_S,
    TOOLS,
    ChannelLost,
    Operation,
    Result,
    journaled,
    key_of,
)
from activities.sandbox.daemon import Daemon, Refused

POLL_S = 0.02
RUNS = ("State", "Running")
START_S = 1.0
"""How long a command that finds no room is tried again."""
WATCHDOG_GRACE_S = 1.0
"""After this the host kills too: a watchdog that the kernel took can't."""
NOT_BEGUN = "exec failed: unable to start container process"
"""What the daemon says where its runtime could not start the process, as in a container that has no room for one."""


class ExecChannel:
    def __init__(self, daemon: Daemon, container: str, box: Path) -> None:
        self._daemon = daemon
        self._container = container
        self._box = box

    async def run(self, op: Operation) -> Result:
        if found := journaled(self._box, op.op_id):
            return found
        again = self._claimed(op.op_id)
        if not again and not await self._start(op):
            return await self._no_room()
        result = await self._wait(op.op_id, op.timeout_s, kill=not op.root)
        return replace(result, replayed=again)

    async def ask(self, op_id: str, wait_s: float) -> Result | None:
        if found := journaled(self._box, op_id):
            return found
        return await self._wait(op_id, wait_s, kill=False) if self._claimed(op_id) else None

    async def kill_agent(self) -> None:
        """Everything of the agent's uid at once. `kill` is the shell's own: it works where nothing can fork. Where the
        agent's processes leave no room for the shell itself, it is tried again."""
        until = time.monotonic() + START_S
        while True:
            try:
                await self._exec(["/bin/sh", "-c", "kill -9 -1"], str(AGENT_UID), [])
            except ChannelLost as lost:
                if NOT_BEGUN not in str(lost) or time.monotonic() > until:
                    raise
                await asyncio.sleep(POLL_S)
            else:
                return

    async def ready(self, within_s: float = 1.0) -> None:
        """Nothing has to come up, but the first process must hold the sandbox open."""
        if not await self._asked("inspect", lambda client: client.containers.container(self._container).show(), *RUNS):
            raise ChannelLost("the container does not run")

    def _claimed(self, op_id: str) -> bool:
        return (self._box / f"{key_of(op_id)}.claim").exists()

    async def _start(self, op: Operation) -> bool:
        """Whether run.sh took the command up. Where the agent's processes leave no room for one more, the daemon says
        that it started it and nothing ran, or that its runtime could not: then it may be tried again."""
        words = [
            op.key,
            str(op.uid),
            f"{op.timeout_s:.3f}",
            str(max(op.cap_bytes // 2, 1)),
            op.folder,
            op.shell,
            op.text,
        ]
        until = None
        while True:
            made = None
            try:
                made = await self._exec([f"{TOOLS}/bin/sh", f"{TOOLS}/run.sh", *words], "0", op.environment)
            except ChannelLost as lost:
                if NOT_BEGUN not in str(lost):
                    raise
            # From here: in the queue for the daemon it did not look for room.
            until = until or time.monotonic() + START_S
            while not self._claimed(op.op_id):
                await asyncio.sleep(POLL_S)
                if made is None or not await self._runs(made):
                    break
            if self._claimed(op.op_id) or time.monotonic() > until:
                return self._claimed(op.op_id)

    async def _runs(self, made: Any) -> bool:
        return bool(await self._asked("inspect exec", lambda _: made.inspect(), "Running"))

    async def _no_room(self) -> Result:
        """The result of a command that could not be started, with what the daemon counts of the sandbox's processes."""
        held = await self._asked(
            "stats", lambda client: client.containers.container(self._container).stats(stream=False), 0, "pids_stats"
        )
        return Result(
            exit_code=None,
            signal=None,
            timed_out=False,
            spawn_errno=errno.EAGAIN,
            seconds=0.0,
            total_bytes=0,
            head=b"",
            tail=b"",
            pids=held.get("current", 0),
            pids_max=held.get("limit", -1),
        )

    async def _exec(self, command: list[str], user: str, environment: list[str]) -> Any:
        async def start(client: Any) -> Any:
            container = client.containers.container(self._container)
            made = await container.exec(command, stdout=False, stderr=False, user=user, environment=environment)
            await made.start(detach=True)
            return made

        return await self._asked("exec", start)

    async def _asked(self, verb: str, action: Callable[[Any], Awaitable[Any]], *path: str | int) -> Any:
        """What lies at `path` in the daemon's answer."""
        try:
            answer = await self._daemon.call(verb, action)
        except Refused as refused:
            raise ChannelLost(str(refused)) from refused
        for step in path:
            answer = answer[step]
        return answer

    async def _wait(self, op_id: str, timeout_s: float, *, kill: bool) -> Result:
        began, killed = time.monotonic(), not kill
        while (waited := time.monotonic() - began) < timeout_s + KILL_S + SLACK_S:
            if found := journaled(self._box, op_id):
                return found
            if not killed and waited > timeout_s + WATCHDOG_GRACE_S:
                killed = True
                await self.kill_agent()
            await asyncio.sleep(POLL_S)
        raise ChannelLost(f"no result of {op_id} within {timeout_s:.1f} s and its margin")
