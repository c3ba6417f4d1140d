"""An agent program in the sandbox itself: started there as the agent, with the endpoint on the sandbox's own loopback.

A sandbox has no network. The endpoint listens on a socket file in the sandbox's folder, which only root reaches there;
`forward`, of the sandbox's tools, puts a port in front of it. Promises: nothing but this attempt's endpoint is behind
that port, and the way is closed when the attempt ends. Used by the run_agent activity.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from activities.agents.endpoint import Access, AgentEndpoint
from activities.agents.session import LONGEST_COMMAND, AgentSession
from activities.generation.server import SERVED_NAME
from activities.sandbox.channel import BOX, TOOLS, Operation, Result
from workflows.contracts import AgentProgram
from workflows.errors import InvalidConfig, SandboxError

SOCKET = "agent.sock"
PORT = 41414
WAY_S = 10.0
LONGEST_S = 3.5 * 3600
"""Its own budgets end it long before."""
ANSWER = "/tmp/ratchet-answer"
NOT_THERE = 127


class SandboxHost(Protocol):
    """What of DockerBackend is needed here."""

    async def run(self, sandbox_id: str, op: Operation) -> Result: ...

    async def kill_agent(self, sandbox_id: str) -> None: ...

    def folder(self, sandbox_id: str) -> Path:
        """The sandbox's folder on this host, which is mounted into it."""
        ...


class InsideProgram:
    """A `Running` one in the sandbox."""

    def __init__(self, session: AgentSession, host: SandboxHost, sandbox_id: str, command: str) -> None:
        self._session, self._host, self._sandbox_id, self._command = session, host, sandbox_id, command
        self._over = self._ended = False
        self.answer = ""
        self.output = b""

    async def ended(self) -> int:
        out = await self._session.play(self._command, LONGEST_S, "program")
        self._over = True
        if out is None:
            return 1
        self.output = out.output.encode()
        return out.exit_code if out.exit_code is not None else 128 + (out.signal or 9)

    async def end(self) -> None:
        if self._ended:
            return
        self._ended = True
        if self._session.broken is not None or self._session.ended is not None:
            return
        if not self._over:
            await self._host.kill_agent(self._sandbox_id)
        if left := await self._session.play(f"[ ! -f {ANSWER} ] || head -c 65536 {ANSWER}", WAY_S, "answer"):
            self.answer = left.output.strip()


@asynccontextmanager
async def started_inside(
    program: AgentProgram,
    session: AgentSession,
    access: Access,
    endpoint: AgentEndpoint,
    host: SandboxHost,
    sandbox_id: str,
    *,
    instruction: str,
) -> AsyncIterator[InsideProgram]:
    """The program for the time of the block. Raises SandboxError, and InvalidConfig where the sandbox has no way out or
    the task is too long."""
    command = _command(program, access, instruction)
    # A socket's path may have 108 bytes and the state folder may be deep: go through a descriptor of its folder.
    folder = os.open(host.folder(sandbox_id), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        async with endpoint.at_socket(Path(f"/proc/self/fd/{folder}/{SOCKET}")):
            await _open_way(host, sandbox_id)
            running = InsideProgram(session, host, sandbox_id, command)
            try:
                yield running
            finally:
                await running.end()
    finally:
        os.close(folder)


async def _open_way(host: SandboxHost, sandbox_id: str) -> None:
    way = Operation(op_id="agent-way", command=f"{TOOLS}/forward {PORT} {BOX}/{SOCKET}", timeout_s=WAY_S, root=True)
    result = await host.run(sandbox_id, way)
    if result.exit_code == NOT_THERE:
        raise InvalidConfig("rollout.agent.inside needs gcc on the sandbox host, for the way to the endpoint")
    if result.exit_code != 0:
        said = (result.head + result.tail).decode(errors="replace").strip()
        raise SandboxError(f"the way to the endpoint can't be opened in the sandbox: {said}")


def _command(program: AgentProgram, access: Access, instruction: str) -> str:
    """What the sandbox's shell runs: the variables, then the program. Raises InvalidConfig."""
    url = f"http://127.0.0.1:{PORT}"
    variables = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": access.key,
        "RATCHET_MODEL": SERVED_NAME,
        "RATCHET_INSTRUCTION": instruction,
        "RATCHET_ANSWER_FILE": ANSWER,
        "NO_PROXY": "127.0.0.1,localhost",
        **program.env,
    }
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    command = "\n".join([*lines, program.command])
    if len(command.encode()) > LONGEST_COMMAND:
        raise InvalidConfig(f"the task is too long for a program in the sandbox: {len(command.encode())} bytes")
    return command
