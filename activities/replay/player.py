"""Plays a recorded attempt again in a fresh sandbox of the same image, prepared from the same snapshot where this host
still has it, and says where the two part.

Promises that the sandboxes it makes are gone when it returns, raises or is cancelled, and that nothing it does touches
the attempt's own. Called by `ratchet replay`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pydantic import BaseModel, computed_field

from activities.replay.comparison import Ending, Match, compare
from activities.replay.recorded import Recorded, RecordedTurn
from activities.sandbox.channel import Operation
from activities.sandbox.commands import agent_operation, output_digest
from activities.sandbox.container import SandboxSpec
from activities.sandbox.docker import DockerBackend
from activities.sandbox.evidence import SandboxGone, broken_by_agent
from activities.sandbox.preparation import Preparation
from activities.sandbox.text import render
from activities.sandbox.verification import Run, judge
from tasksets.base import Task
from workflows.contracts import ActOutput, StopReason
from workflows.errors import SandboxError, VerifierBrokenByAnswer
from workflows.outcome import needs_verdict

KIND = "replay"
SHORTEST_S = 0.1


class PlayedTurn(BaseModel):
    turn: int
    command: str
    match: Match
    note: str
    recorded: Ending
    replayed: Ending
    recorded_output: str | None = None
    """What the agent saw, where the turn differs and a later turn shows it."""
    replayed_output: str | None = None


class PlayedVerdict(BaseModel):
    """`replayed` None: this answer broke the verifier."""

    recorded: float
    replayed: float | None
    agrees: bool
    detail: str


class Played(BaseModel):
    """`stopped` says why not all commands were run, empty where they were; `verdict` None: the attempt was not graded,
    or the replay stopped."""

    attempt: str
    task: str
    image: str
    turns: list[PlayedTurn]
    stopped: str
    verdict: PlayedVerdict | None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def agrees(self) -> bool:
        turns = all(turn.match is not Match.DIFFERS for turn in self.turns)
        return turns and (self.verdict is None or self.verdict.agrees)


class Player:
    def __init__(self, backend: DockerBackend, recorded: Recorded, task: Task) -> None:
        self._backend = backend
        self._recorded = recorded
        self._task = task
        self._name = f"{recorded.episode.id}/replay-{uuid.uuid4().hex[:8]}"

    async def play(self, *, go_on: bool, show: Callable[[PlayedTurn], None]) -> Played:
        """Run the commands, up to the first difference unless `go_on`, then the verifier where the attempt was graded;
        `show` gets each turn as it ends. Raises SandboxError, VerifierError."""
        turns: list[PlayedTurn] = []
        stopped, verdict = "", None
        async with self._sandbox("agent") as (sandbox_id, run):
            for recorded in self._recorded.commands:
                turns.append(await self._turn(run, recorded))
                show(turns[-1])
                if stopped := _stop(turns[-1], go_on):
                    break
            if not stopped and self._was_graded:
                await self._backend.kill_agent(sandbox_id)
                verdict = await self._verdict(run)
        episode = self._recorded.episode
        return Played(
            attempt=episode.id,
            task=episode.task,
            image=episode.image_id,
            turns=turns,
            stopped=stopped,
            verdict=verdict,
        )

    @property
    def _was_graded(self) -> bool:
        reason = StopReason(self._recorded.episode.stop_reason)
        judged = needs_verdict(reason) or reason in (StopReason.TAMPERED, StopReason.VERIFIER_BROKEN_BY_ANSWER)
        return judged and self._recorded.episode.reward is not None

    async def _turn(self, run: Run, recorded: RecordedTurn) -> PlayedTurn:
        limits = self._recorded.limits
        # What was left of the time budget may have cut the last command short.
        budget = max(recorded.act_s, SHORTEST_S) if recorded.ending.timed_out else limits.step_timeout_s
        op = agent_operation(
            f"t{recorded.turn}",
            recorded.action.command,
            timeout_s=min(limits.step_timeout_s, budget),
            max_output_chars=limits.max_output_chars,
        )
        replayed, seen = await _run(run, op, limits.max_output_chars)
        match, note = self._compare(recorded, replayed)
        differs = match is Match.DIFFERS
        return PlayedTurn(
            turn=recorded.turn,
            command=recorded.action.command,
            match=match,
            note=note,
            recorded=recorded.ending,
            replayed=replayed,
            recorded_output=await asyncio.to_thread(self._recorded.observation, recorded.turn) if differs else None,
            replayed_output=seen if differs else None,
        )

    def _compare(self, recorded: RecordedTurn, replayed: Ending) -> tuple[Match, str]:
        """An attempt that broke its sandbox did so with its last command."""
        last = recorded is self._recorded.commands[-1]
        broke = last and self._recorded.episode.stop_reason == StopReason.SANDBOX_KILLED_BY_AGENT
        if broke != (replayed.broken != ""):
            return Match.DIFFERS, "it broke the sandbox" if replayed.broken else "it did not break the sandbox"
        if broke:
            return Match.AGREES, "it broke the sandbox again"
        return compare(recorded.ending, replayed)

    async def _verdict(self, run: Run) -> PlayedVerdict:
        episode = self._recorded.episode
        assert episode.reward is not None
        broke = episode.stop_reason == StopReason.VERIFIER_BROKEN_BY_ANSWER
        try:
            verdict = await judge(self._task, self._recorded.answer, run, self._known_good)
        except VerifierBrokenByAnswer as error:
            return PlayedVerdict(recorded=episode.reward, replayed=None, agrees=broke, detail=str(error))
        reward = 1.0 if verdict.passed else 0.0
        agrees = episode.tampered if verdict.tampered else not broke and reward == episode.reward
        return PlayedVerdict(recorded=episode.reward, replayed=reward, agrees=agrees, detail=verdict.detail)

    @asynccontextmanager
    async def _known_good(self) -> AsyncIterator[Run]:
        async with self._sandbox("proof") as (_, run):
            yield run

    @asynccontextmanager
    async def _sandbox(self, role: str) -> AsyncIterator[tuple[str, Run]]:
        if not self._recorded.episode.image_id:
            raise SandboxError(f"{self._recorded.episode.id} never had a sandbox: nothing was run", retryable=False)
        labels = {"kind": KIND, "run": KIND, "attempt": f"{self._name}/{role}", "task": self._task.id}
        sandbox_id = self._backend.id_of(labels["attempt"], KIND)
        try:
            preparation = Preparation(self._backend)
            spec = SandboxSpec(
                image=self._recorded.episode.image_id,
                runtime=self._recorded.limits.runtime,
                binds=preparation.binds(self._task),
            )
            sandbox = await self._backend.acquire(spec, labels)
            await preparation.prepare(self._task, sandbox)
            yield sandbox_id, preparation.run_in(self._task, sandbox_id)
        finally:
            await self._backend.close(sandbox_id)


def _stop(turn: PlayedTurn, go_on: bool) -> str:
    if turn.replayed.broken:
        return f"turn {turn.turn} broke the sandbox"
    return f"turn {turn.turn} differs; --all goes on" if turn.match is Match.DIFFERS and not go_on else ""


async def _run(run: Run, op: Operation, max_output_chars: int) -> tuple[Ending, str]:
    """(how it ended, what the agent would have seen). Raises SandboxError where the sandbox was taken away."""
    try:
        result = await run(op)
    except SandboxGone as gone:
        if not gone.by_agent:
            raise
        return Ending(broken=str(gone)), ""
    ending = Ending(
        exit_code=result.exit_code,
        timed_out=result.timed_out,
        digest=output_digest(result),
        broken=broken_by_agent(result),
    )
    shown = ActOutput(
        exit_code=result.exit_code,
        signal=None if result.timed_out else result.signal,
        timed_out=result.timed_out,
        output=render(result, max_output_chars),
        command_s=result.seconds,
    )
    return ending, shown.observation()
