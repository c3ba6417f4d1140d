"""The attempt's sandbox as the Episode workflow uses it: acquire, act, verify, release, and what becomes of a loss.

Owns the lease, the journal and the times. Where sandboxes have hosts of their own, any host with room answers `acquire`
and all else goes to the queue of the host in the lease; one that takes nothing up for a while is dead, which is the
loss of the sandbox, and its name is in the reason. Promises: a lost sandbox ends the attempt as the table says, unless
the run has `replay_on_loss`; then the attempt gets a fresh sandbox of the same image, its journal is replayed into it,
and the call that met the loss is made there, but only if every command ended as before. Replays cost the agent none of
its time and are bounded. Called by Episode.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from temporalio.exceptions import ActivityError, TimeoutError, TimeoutType

from workflows import policies
from workflows.attributes import shorten
from workflows.contracts import (
    AcquireInput,
    AcquireOutput,
    ActInput,
    ActOutput,
    EpisodeInput,
    JournalEntry,
    Message,
    ReleaseInput,
    ReplayOutput,
    SandboxLease,
    StopReason,
    VerifyInput,
    VerifyOutput,
)
from workflows.ending import Ended, ended_by
from workflows.journal import Journal
from workflows.outcome import Boundary
from workflows.transcript import Transcript

Result = TypeVar("Result")
Answer = TypeVar("Answer", bound=Message)

MOST_REPLAYS = 2
"""Sandboxes that one attempt may lose and go on."""


class AttemptSandbox:
    """`lease` is None until the first `acquire` has come back."""

    def __init__(self, input: EpisodeInput, transcript: Transcript) -> None:
        self._input = input
        self._transcript = transcript
        self._journal = Journal(input.limits.max_output_chars)
        self.lease: SandboxLease | None = None
        self.replays = 0
        self.command_s = 0.0
        """Time of the agent's own commands; those of a replay are not its own."""
        self.boot_s = 0.0
        self.verify_s = 0.0
        self._grading_s = 0.0
        """What the task's own verifier may take, beside what any may."""
        self.queue_s = 0.0
        self._host_gone = False
        """Whether the lease's host took up nothing any more."""
        self.evidence: dict[str, str] = {}
        """What was measured on whose doing the last call's end was; empty for most."""

    async def acquire(self) -> None:
        """Raises Ended."""
        message = AcquireInput(
            run=self._input.run,
            group_id=self._input.group_id,
            attempt_id=self._input.attempt_id,
            task=self._input.task,
            generation=self.replays,
            runtime=self._input.limits.runtime,
        )
        anywhere = self._input.limits.sandboxes
        policy = policies.PLACE if anywhere else policies.ACQUIRE
        summary = f"{'fresh ' if self.replays else ''}sandbox for {self._input.task.task_id}"
        try:
            out = await policies.call(
                "acquire", message, AcquireOutput, policy, summary=summary, queue=anywhere or None
            )
        except ActivityError as error:
            raise self._noted(ended_by(error, Boundary.SANDBOX)) from error
        self.lease, self._grading_s, self._host_gone = out.lease, out.grading_s, False
        self.boot_s += out.timing.run_s
        self.queue_s += out.timing.queue_s

    async def act(self, turn: int, command: str, timeout_s: float) -> ActOutput:
        """Run the agent's command. Raises Ended where the sandbox is lost."""

        def message(lease: SandboxLease) -> ActInput:
            return ActInput(
                lease=lease,
                op_id=f"t{turn}",
                turn=turn,
                command=command,
                step_timeout_s=timeout_s,
                max_output_chars=self._input.limits.max_output_chars,
            )

        policy, summary = policies.SANDBOX.lasting(timeout_s), f"turn {turn}: {shorten(command)}"
        out = await self._surviving(
            Boundary.SANDBOX,
            lambda lease: _there(lease, "act", message(lease), ActOutput, policy, summary),
        )
        self.evidence = out.evidence
        self.command_s += out.command_s
        self.queue_s += out.timing.queue_s
        self._journal.add(message(self._held()), out)
        return out

    async def verify(self, answer: str, summary: str) -> VerifyOutput:
        """Raises Ended."""

        def message(lease: SandboxLease) -> VerifyInput:
            return VerifyInput(lease=lease, task=self._input.task, answer=answer)

        policy = policies.VERIFY.lasting(self._grading_s)
        out = await self._surviving(
            Boundary.VERIFIER,
            lambda lease: _there(lease, "verify", message(lease), VerifyOutput, policy, summary),
        )
        self.evidence = out.evidence or self.evidence
        self.verify_s += out.timing.run_s
        self.queue_s += out.timing.queue_s
        return out

    async def release(self) -> None:
        """Runs on every way out. A release that fails is the sweep's work, not the attempt's fate; so is that of a host
        which is gone, or of one that nobody learnt of."""
        message = ReleaseInput(attempt_id=self._input.attempt_id, lease=self.lease)
        queue = self.lease.queue if self.lease else ""
        if self._host_gone or (self._input.limits.sandboxes and not queue):
            return
        policy = policies.CLEAN_UP.pinned() if queue else policies.CLEAN_UP
        with suppress(ActivityError):
            await policies.call(
                "release", message, type(None), policy, summary="remove the sandbox", queue=queue or None
            )

    # --- losses ---------------------------------------------------------------------------------------------------

    def _noted(self, end: Ended) -> Ended:
        self.evidence = end.evidence
        return end

    def _held(self) -> SandboxLease:
        assert self.lease is not None
        return self.lease

    async def _surviving(self, boundary: Boundary, call: Callable[[SandboxLease], Awaitable[Result]]) -> Result:
        """`call` on the sandbox, and after a loss on the one that takes its place. Raises Ended."""
        while True:
            try:
                return await call(self._held())
            except ActivityError as error:
                end = self._noted(self._placed(ended_by(error, boundary), error))
                if end.reason is not StopReason.SANDBOX_LOST or not self._input.limits.replay_on_loss:
                    raise end from error
            await self._restore(end.why)

    def _placed(self, end: Ended, error: ActivityError) -> Ended:
        """The same, with the host named where there are several."""
        lease = self._held()
        if not lease.queue:
            return end
        cause = error.cause
        self._host_gone = isinstance(cause, TimeoutError) and cause.type is TimeoutType.SCHEDULE_TO_START
        why = f"it takes up nothing any more ({end.why})" if self._host_gone else end.why
        return Ended(end.reason, f"host {lease.host}: {why}", end.evidence)

    async def _restore(self, why: str) -> None:
        """A fresh sandbox in the state that the lost one had. Raises Ended."""
        if self._journal.obstacle:
            raise Ended(StopReason.SANDBOX_LOST, f"{why}; {self._journal.obstacle}")
        if self.replays == MOST_REPLAYS:
            raise Ended(StopReason.SANDBOX_LOST, f"{why}; {MOST_REPLAYS} replays are spent")
        self.replays += 1
        image_id = self._held().image_id
        await self.acquire()
        if self._held().image_id != image_id:
            raise Ended(StopReason.SANDBOX_LOST, f"{why}; a fresh sandbox has another image: {self._held().image_id}")
        for part in self._journal.parts():
            # A loss within a replay begins it anew; what this sandbox has run by then is answered from its own journal.
            out = await self._surviving(Boundary.SANDBOX, self._replay(part))
            self.boot_s += out.timing.run_s
            self.queue_s += out.timing.queue_s
            if out.differs_at is not None:
                raise Ended(StopReason.SANDBOX_LOST, f"{why}; replayed, turn {out.differs_at} differed: {out.why}")
        self._transcript.replayed(self.replays, len(self._journal), why)

    def _replay(self, part: list[JournalEntry]) -> Callable[[SandboxLease], Awaitable[ReplayOutput]]:
        longest = min(sum(entry.step_timeout_s for entry in part), self._input.limits.time_budget_s)
        policy, summary = policies.SANDBOX.lasting(longest), f"replay {len(part)} commands, loss {self.replays}"
        return lambda lease: _there(lease, "replay", self._journal.message(lease, part), ReplayOutput, policy, summary)


async def _there(
    lease: SandboxLease, name: str, message: Message, result: type[Answer], policy: policies.Policy, summary: str
) -> Answer:
    """The call, where the sandbox lives. Raises ActivityError."""
    policy = policy.pinned() if lease.queue else policy
    return await policies.call(name, message, result, policy, summary=summary, queue=lease.queue or None)
