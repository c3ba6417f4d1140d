"""Scripted stand-ins for the activities of an episode, at the seam that Temporal gives: names and messages.

Unit tests of the workflows only; fakes.py has those of runs and evaluations.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from temporalio import activity

from workflows.contracts import (
    AcquireInput,
    AcquireOutput,
    ActInput,
    Action,
    ActionKind,
    ActOutput,
    EpisodeRecord,
    FinishReason,
    GenerateInput,
    GenerateOutput,
    HostInput,
    HostStatus,
    ReleaseInput,
    RunAgentInput,
    RunAgentOutput,
    SandboxLease,
    StopReason,
    TurnRecord,
    VerifyInput,
    VerifyOutput,
)

COMMAND = Action(kind=ActionKind.COMMAND, command="cat /data/a")
ANSWER = Action(kind=ActionKind.FINAL, answer="42")
MALFORMED = Action(kind=ActionKind.MALFORMED, error="no action found")


class EpisodeWorld:
    """What an Episode asks for."""

    def __init__(self) -> None:
        self.version = 0
        self.calls: dict[str, list[Any]] = defaultdict(list)
        self.actions: Callable[[GenerateInput], Action] = lambda m: COMMAND if m.turn == 0 else ANSWER
        self.reward: Callable[[VerifyInput], float] = lambda m: float(m.lease.attempt_id.split("/")[-2][1:]) % 2
        self.fail: Callable[[str, Any], None] = lambda name, message: None
        self.act_output = ActOutput(exit_code=0, output="42\n", command_s=0.01)
        self.finish_reason = FinishReason.STOP
        self.gate: asyncio.Event | None = None
        self.gated: Callable[[GenerateInput], bool] = lambda m: True
        """Which generations wait at the gate."""
        self.hold: Callable[[GenerateInput], Awaitable[None]] | None = None
        """Awaited by each generation before it answers."""
        self.verdicts: asyncio.Event | None = None
        """Verdicts wait for it, deaf to cancellation."""
        self.sandbox_queue = ""
        """Where calls on sandboxes go; empty: the episode's own queue."""
        self.grading_s = 0.0
        self.verify_limits: list[timedelta | None] = []
        self.program: Callable[[RunAgentInput], RunAgentOutput] = lambda m: RunAgentOutput(
            stop_reason=StopReason.FINISHED,
            why="the agent program ended with exit 0",
            answer="42",
            turns=[TurnRecord(turn=0, segment=f"{m.attempt_id}/t0", sampled_tokens=5, action="ls", exit_code=0)],
            sampled_tokens=5,
            sequence_tokens=9,
            command_s=0.5,
        )

    def _note(self, name: str, message: Any) -> None:
        self.calls[name].append(message)
        self.fail(name, message)

    @property
    def activities(self) -> list[Callable[..., Any]]:
        members = (getattr(self, name) for name in dir(self) if name != "activities")
        return [member for member in members if hasattr(member, "__temporal_activity_definition")]

    @activity.defn
    async def run_agent(self, message: RunAgentInput) -> RunAgentOutput:
        self._note("run_agent", message)
        return self.program(message)

    @activity.defn
    async def host(self, message: HostInput) -> HostStatus:
        self._note("host", message)
        return HostStatus(host=message.host, slots=4, used=1, draining=bool(message.drain))

    @activity.defn
    async def acquire(self, message: AcquireInput) -> AcquireOutput:
        self._note("acquire", message)
        lease = SandboxLease(
            sandbox_id="s",
            container_id="c",
            image_id="sha256:i",
            host="h",
            attempt_id=message.attempt_id,
            queue=self.sandbox_queue,
        )
        return AcquireOutput(lease=lease, grading_s=self.grading_s)

    @activity.defn
    async def generate(self, message: GenerateInput) -> GenerateOutput:
        self._note("generate", message)
        if self.gate is not None and self.gated(message):
            await self.gate.wait()
        if self.hold is not None:
            await self.hold(message)
        return GenerateOutput(
            segment=f"{message.attempt_id}/t{message.turn}",
            action=self.actions(message),
            text="text",
            finish_reason=self.finish_reason,
            engine="h-e0",
            prompt_tokens=10,
            sampled_tokens=5,
            min_version=self.version,
            max_version=self.version,
        )

    @activity.defn
    async def act(self, message: ActInput) -> ActOutput:
        self._note("act", message)
        return self.act_output

    @activity.defn
    async def verify(self, message: VerifyInput) -> VerifyOutput:
        self._note("verify", message)
        self.verify_limits.append(activity.info().start_to_close_timeout)
        if self.verdicts is not None:
            await self.verdicts.wait()
        reward = self.reward(message)
        return VerifyOutput(reward=reward, passed=reward >= 1)

    @activity.defn
    async def release(self, message: ReleaseInput) -> None:
        self._note("release", message)

    @activity.defn
    async def record_episode(self, message: EpisodeRecord) -> None:
        self._note("record_episode", message)
