"""The `run_agent` activity: an external agent program from its start to its end, on one attempt's sandbox.

Promises: the program starts once per attempt, whoever is asked again; what infrastructure did ends as that boundary's
final error, never as an answer, and a worker that dies takes the program with it; everything that the policy or the
program did ends as a stop reason of the table. Called by the Episode workflow, on the host of the sandbox.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.agents.endpoint import Access, AgentEndpoint
from activities.agents.inside import SandboxHost, started_inside
from activities.agents.program import KILLED, Running, started
from activities.agents.session import AgentSession, Spent
from activities.generation.activities import GenerationActivities
from activities.generation.tool_calls import split_thoughts
from activities.generation.transcript import Template
from storage.objects import ObjectStore
from tasksets.base import Taskset
from workflows.contracts import (
    ActInput,
    ActOutput,
    AgentProgram,
    FailureType,
    RunAgentInput,
    RunAgentOutput,
    SandboxLease,
    StopReason,
    Timing,
)
from workflows.errors import InvalidConfig, RatchetError, SandboxError, StorageError, Undetermined

LOOK_EVERY_S = 0.2
CLAIM_S = 10.0
TAIL_CHARS = 300
MESSAGE_BYTES = 60 << 10
"""Of a report: a message holds 64 KiB."""
MOST_ANSWER_BYTES = 40 << 10
"""Of an answer, as JSON: it goes on in another message."""
_ANSWER = re.compile(r"^[ \t]*Answer:(.*)$", re.MULTILINE)


class AgentActivities:
    """`act` runs a command in a sandbox of this host, at most once per op_id; `spool` is for the folders of programs,
    `path` is their PATH; `host` has the sandboxes, for programs that run in them."""

    def __init__(
        self,
        generation: GenerationActivities,
        act: Callable[[ActInput], Awaitable[ActOutput]],
        store: ObjectStore,
        open_taskset: Callable[[str], Taskset],
        endpoint: AgentEndpoint,
        *,
        spool: Path,
        path: str,
        host: SandboxHost | None = None,
    ) -> None:
        self._generation, self._act, self._store = generation, act, store
        self._open_taskset, self._endpoint = open_taskset, endpoint
        self._spool, self._path, self._host = spool, path, host

    @activity.defn(name="run_agent")
    async def run_agent(self, message: RunAgentInput) -> RunAgentOutput:
        """Raises EngineError, SandboxError, StorageError, Undetermined, InvalidConfig: final once it has started."""
        info = activity.info()
        queue_s = max((info.started_time - info.current_attempt_scheduled_time).total_seconds(), 0.0)
        program = message.limits.agent
        if program is None:
            raise InvalidConfig("rollout.harness external needs rollout.agent, the program")
        template = await asyncio.to_thread(Template.load, message.model)
        task = await asyncio.to_thread(lambda: self._open_taskset(message.task.taskset).load(message.task.task_id))
        await self._claim(message.lease)
        try:
            return await self._run(message, program, template, task.instruction, queue_s)
        except RatchetError as error:
            error.retryable = False
            raise
        except asyncio.CancelledError:
            if activity.is_worker_shutdown():
                raise ApplicationError("it ended", type=FailureType.WORKER, non_retryable=True) from None
            raise

    async def _claim(self, lease: SandboxLease) -> None:
        """Take the sandbox for this try. Its journal knows if an earlier one has, whose program has changed it.

        Raises SandboxError, retryable where the sandbox is another host's, and ApplicationError."""
        token = secrets.token_hex(8)
        claim = ActInput(
            lease=lease, op_id="agent", turn=0, command=f"echo {token}", step_timeout_s=CLAIM_S, max_output_chars=100
        )
        out = await self._act(claim)
        if out.sandbox_broken:
            raise SandboxError(f"the sandbox broke before its agent began: {out.sandbox_broken}", retryable=False)
        if out.output.strip() != token:
            raise ApplicationError(
                "the worker that ran its program was lost", type=FailureType.WORKER, non_retryable=True
            )

    async def _run(
        self, message: RunAgentInput, program: AgentProgram, template: Template, instruction: str, queue_s: float
    ) -> RunAgentOutput:
        began = time.monotonic()
        session = AgentSession(message, template, self._generation, self._act)
        async with (
            self._endpoint.serving(session) as access,
            self._started(message, program, session, access, instruction) as running,
        ):
            code = await _end_of(running, session, program)
            await running.end()
        await self._keep(message, running.output)
        ending = _ending(session, program, code, running.output)
        answer = running.answer or _answer(session.last_text)
        out = RunAgentOutput(
            stop_reason=ending.reason,
            why=ending.why,
            turns=session.turns,
            sampled_tokens=session.sampled_tokens,
            sequence_tokens=session.sequence_tokens,
            command_s=session.command_s,
            evidence=session.evidence,
            timing=Timing(queue_s=queue_s + session.queue_s, run_s=time.monotonic() - began),
        )
        room = min(MOST_ANSWER_BYTES, MESSAGE_BYTES - len(out.model_dump_json()))
        return out.model_copy(update={"answer": _cut(answer, room)})

    def _started(
        self, message: RunAgentInput, program: AgentProgram, session: AgentSession, access: Access, instruction: str
    ) -> AbstractAsyncContextManager[Running]:
        if not program.inside:
            return started(program, access, instruction=instruction, path=self._path, spool=self._spool)
        if self._host is None:
            raise InvalidConfig("rollout.agent.inside: this worker has no sandboxes")
        sandbox_id = message.lease.sandbox_id
        return started_inside(program, session, access, self._endpoint, self._host, sandbox_id, instruction=instruction)

    async def _keep(self, message: RunAgentInput, output: bytes) -> None:
        """What the program printed, beside the turns. A store that does not take it costs the attempt nothing."""
        if output:
            with suppress(StorageError):
                await asyncio.to_thread(self._store.put, output_key(message.run, message.attempt_id), output)


def output_key(run: str, attempt_id: str) -> str:
    """Where the end of what an attempt's program printed is kept."""
    return f"runs/{run}/trajectories/{attempt_id.removeprefix(f'{run}/')}/agent-output.txt"


async def _end_of(running: Running, session: AgentSession, program: AgentProgram) -> int | None:
    """The program's exit code; None where it has to be ended: for what was done, for what is spent and not heeded, or
    because it takes longer than it may beside its calls."""
    began = time.monotonic()
    refused_since: float | None = None
    ended = asyncio.create_task(running.ended())
    try:
        while True:
            done, _ = await asyncio.wait({ended}, timeout=LOOK_EVERY_S)
            if done:
                return ended.result()
            if session.broken is not None or session.ended is not None:
                return None
            now = time.monotonic()
            spent = session.spent is not None and session.spent.reason is not StopReason.CONTEXT_FULL
            refused_since = (refused_since or now) if spent else None
            if refused_since is not None and now - refused_since > program.grace_s:
                return None
            if now - began - session.waited_s > program.own_time_s:
                why = f"the program took more than {program.own_time_s:g} s beside its calls (rollout.agent.own_time_s)"
                session.ended = Spent(StopReason.TIME_BUDGET, why)
                return None
    finally:
        ended.cancel()


def _ending(session: AgentSession, program: AgentProgram, code: int | None, output: bytes) -> Spent:
    """What ended the attempt, and why. Raises what broke it, and Undetermined where the policy had no part in it."""
    if session.broken is not None:
        raise session.broken
    if session.turns and session.ended is not None:
        return session.ended
    tail = output.decode(errors="replace").strip()[-TAIL_CHARS:]
    if not session.turns and session.spent is None:
        how = session.ended.why if session.ended is not None else f"it ended with exit {code}"
        raise Undetermined(f"the agent program never got an answer of the policy; {how}; its last words: {tail!r}")
    if code == KILLED and not program.inside:
        raise Undetermined(f"somebody killed the agent program; its last words: {tail!r}", evidence={"exit": str(code)})
    if session.spent is not None:
        return session.spent
    words = f"; its last words: {tail!r}" if code else ""
    return Spent(StopReason.FINISHED, f"the agent program ended with exit {code}{words}")


def _cut(answer: str, most_bytes: int) -> str:
    """The beginning of it that takes no more than that in a message, whatever characters it is made of."""
    while answer and len(json.dumps(answer, ensure_ascii=False).encode()) > most_bytes:
        answer = answer[: len(answer) * 3 // 4]
    return answer


def _answer(text: str) -> str:
    """What the policy's last text gives as its answer; empty for none."""
    lines = _ANSWER.findall(split_thoughts(text)[1])
    return lines[-1].strip() if lines else ""
