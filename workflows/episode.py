"""Episode: one attempt at a task: acquire, (generate, act)*, verify, record, release.

Owns the order of things and the ending; promises that every ending is classified (it never raises for a failure that
the table knows), that the sandbox is released whatever happens, and that the attempt's row is written before it
reports. Runs as a child of Group or Evaluation, on the queue of its activities.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from workflows import policies
    from workflows.attributes import OUTCOME, POLICY_VERSION, REWARD, STOP_REASON, shorten
    from workflows.contracts import (
        AcquireInput,
        AcquireOutput,
        ActInput,
        Action,
        ActionKind,
        ActOutput,
        EpisodeInput,
        EpisodeRecord,
        EpisodeSummary,
        FinishReason,
        GenerateInput,
        GenerateOutput,
        ReleaseInput,
        Sampling,
        SandboxLease,
        StopReason,
        TurnRecord,
        VerifyInput,
        VerifyOutput,
        derive_seed,
    )
    from workflows.outcome import Boundary, judge, needs_verdict, stop_reason_of
    from workflows.transcript import Transcript


class _Ended(Exception):
    """The attempt is over: internal, never crosses the workflow."""

    def __init__(self, reason: StopReason, why: str = "") -> None:
        super().__init__(reason)
        self.reason, self.why = reason, why


@workflow.defn(name="Episode", failure_exception_types=[Exception])
class Episode:
    def __init__(self) -> None:
        self._turns: list[TurnRecord] = []
        self._lease: SandboxLease | None = None
        self._answer = ""
        self._sampled = 0
        self._sequence = 0
        self._command_s = 0.0
        self._queue_s = 0.0
        self._boot_s = 0.0
        self._verify_s = 0.0

    @workflow.run
    async def run(self, input: EpisodeInput) -> EpisodeSummary:
        self._input = input
        self._transcript = Transcript(input.attempt_id, input.task.task_id)
        self._started_at = workflow.now().timestamp()
        try:
            reason, why = await self._play()
            verdict = None
            if needs_verdict(reason):
                verdict, reason, why = await self._verify(reason, why)
        except (Exception, asyncio.CancelledError):
            await self._release()
            raise
        record = self._record(reason, why, verdict)
        released = asyncio.create_task(self._release())
        await policies.call(
            "record_episode", record, type(None), policies.LINEAGE, summary=f"{record.outcome}: {shorten(record.why)}"
        )
        await released
        self._show(record)
        return EpisodeSummary(**{name: getattr(record, name) for name in EpisodeSummary.model_fields})

    # --- the turns ------------------------------------------------------------------------------------------------

    async def _play(self) -> tuple[StopReason, str]:
        """Turns until the attempt ends; the ending and why. The sandbox boots while the first answer is made."""
        boot = asyncio.create_task(self._acquire())
        try:
            observation: str | None = None
            reminders = 0
            for turn in range(self._input.limits.max_turns):
                answer = await self._generate(turn, observation)
                match answer.action.kind:
                    case ActionKind.FINAL:
                        self._answer = answer.action.answer
                        raise _Ended(StopReason.FINISHED, f"answered {shorten(self._answer)!r}")
                    case ActionKind.MALFORMED if answer.finish_reason is FinishReason.LENGTH:
                        raise _Ended(StopReason.MAX_TOKENS, f"turn {turn} was cut at its token budget")
                    case ActionKind.MALFORMED if reminders == self._input.limits.malformed_reminders:
                        raise _Ended(StopReason.MALFORMED_ACTION, answer.action.error)
                    case ActionKind.MALFORMED:
                        reminders += 1
                        observation = answer.action.error
                        self._transcript.note(turn, observation)
                    case ActionKind.COMMAND:
                        await boot
                        result = await self._act(turn, answer.action)
                        observation = result.observation()
            raise _Ended(StopReason.MAX_TURNS, f"{self._input.limits.max_turns} turns are spent")
        except _Ended as end:
            # The verdict, or the release, needs to know the sandbox.
            with suppress(_Ended):
                await boot
            return (end.reason, end.why) if self._lease else await self._boot_failure(boot, end)
        except (ActivityError, asyncio.CancelledError):
            boot.cancel()
            with suppress(_Ended, ActivityError, asyncio.CancelledError):
                await boot
            raise

    async def _boot_failure(self, boot: asyncio.Task[None], end: _Ended) -> tuple[StopReason, str]:
        """An engine's failure stands; any other ending without a sandbox is the sandbox's loss."""
        if not needs_verdict(end.reason):
            return end.reason, end.why
        failure = boot.exception()
        return (failure.reason, failure.why) if isinstance(failure, _Ended) else (end.reason, end.why)

    async def _acquire(self) -> None:
        message = AcquireInput(
            run=self._input.run,
            group_id=self._input.group_id,
            attempt_id=self._input.attempt_id,
            task=self._input.task,
        )
        try:
            out = await policies.call(
                "acquire", message, AcquireOutput, policies.SANDBOX, summary=f"sandbox for {self._input.task.task_id}"
            )
        except ActivityError as error:
            raise _lost(error, Boundary.SANDBOX) from error
        self._lease = out.lease
        self._boot_s += out.timing.run_s
        self._queue_s += out.timing.queue_s

    async def _generate(self, turn: int, observation: str | None) -> GenerateOutput:
        limits = self._input.limits
        left = min(limits.max_tokens_per_turn, limits.max_tokens - self._sampled)
        if left <= 0:
            raise _Ended(StopReason.MAX_TOKENS, f"{limits.max_tokens} sampled tokens are spent")
        message = GenerateInput(
            run=self._input.run,
            attempt_id=self._input.attempt_id,
            session=self._input.attempt_id,
            turn=turn,
            model=self._input.model,
            task=self._input.task,
            segments=[record.segment for record in self._turns if record.segment is not None],
            observation=observation,
            sampling=Sampling(temperature=limits.temperature, max_tokens=left, context_length=limits.context_length),
            seed=derive_seed(self._input.seed, turn),
            priority=self._input.priority,
        )
        try:
            out = await policies.call(
                "generate", message, GenerateOutput, policies.GENERATE, summary=self._transcript.summary(turn)
            )
        except ActivityError as error:
            raise _lost(error, Boundary.ENGINE) from error
        if out.finish_reason is FinishReason.CONTEXT_FULL:
            raise _Ended(
                StopReason.CONTEXT_FULL, f"the prompt of turn {turn} does not fit {limits.context_length} tokens"
            )
        self._sampled += out.sampled_tokens
        self._sequence = out.prompt_tokens + out.sampled_tokens
        self._queue_s += out.timing.queue_s
        self._turns.append(_turn_record(turn, out))
        self._transcript.answered(turn, out)
        return out

    async def _act(self, turn: int, action: Action) -> ActOutput:
        limits = self._input.limits
        left = limits.time_budget_s - self._command_s
        timeout = min(limits.step_timeout_s, left)
        assert self._lease is not None
        message = ActInput(
            lease=self._lease,
            op_id=f"t{turn}",
            turn=turn,
            command=action.command,
            step_timeout_s=timeout,
            max_output_chars=limits.max_output_chars,
        )
        try:
            out = await policies.call(
                "act",
                message,
                ActOutput,
                policies.SANDBOX.lasting(timeout),
                summary=f"turn {turn}: {shorten(action.command)}",
            )
        except ActivityError as error:
            raise _lost(error, Boundary.SANDBOX) from error
        self._command_s += out.command_s
        self._queue_s += out.timing.queue_s
        self._turns[-1] = self._turns[-1].model_copy(
            update={"exit_code": out.exit_code, "timed_out": out.timed_out, "act_s": out.timing.run_s}
        )
        self._transcript.acted(turn, out)
        if out.sandbox_broken:
            raise _Ended(StopReason.SANDBOX_KILLED_BY_AGENT, out.sandbox_broken)
        if self._command_s >= limits.time_budget_s or (out.timed_out and timeout < limits.step_timeout_s):
            raise _Ended(StopReason.TIME_BUDGET, f"its commands ran {self._command_s:.1f} s")
        return out

    # --- the ending -----------------------------------------------------------------------------------------------

    async def _verify(self, reason: StopReason, why: str) -> tuple[VerifyOutput | None, StopReason, str]:
        assert self._lease is not None
        message = VerifyInput(lease=self._lease, task=self._input.task, answer=self._answer)
        try:
            out = await policies.call(
                "verify",
                message,
                VerifyOutput,
                policies.VERIFY,
                summary=f"verify {self._input.task.task_id}: {reason}",
            )
        except ActivityError as error:
            end = _lost(error, Boundary.VERIFIER)
            return None, end.reason, end.why
        self._verify_s += out.timing.run_s
        self._queue_s += out.timing.queue_s
        self._transcript.verified(out)
        if out.tampered:
            return out, StopReason.TAMPERED, out.detail
        return out, reason, f"{why}; {out.detail}" if out.detail else why

    async def _release(self) -> None:
        """Runs on every way out. A release that fails is the sweep's work, not the attempt's fate."""
        message = ReleaseInput(attempt_id=self._input.attempt_id, lease=self._lease)
        with suppress(ActivityError):
            await policies.call("release", message, type(None), policies.CLEAN_UP, summary="remove the sandbox")

    def _record(self, reason: StopReason, why: str, verdict: VerifyOutput | None) -> EpisodeRecord:
        input = self._input
        judgement = judge(reason, verdict, input.limits.failure_reward)
        return EpisodeRecord(
            attempt_id=input.attempt_id,
            episode_id=input.episode_id,
            group_id=input.group_id,
            run=input.run,
            kind=input.kind,
            task=input.task,
            attempt=input.attempt,
            outcome=judgement.outcome,
            stop_reason=reason,
            reward=judgement.reward,
            why=shorten(why, 400),
            tampered=bool(verdict and verdict.tampered),
            image_id=self._lease.image_id if self._lease else "",
            seed=input.seed,
            min_version=min((turn.min_version for turn in self._turns), default=None),
            max_version=max((turn.max_version for turn in self._turns), default=None),
            sampled_tokens=self._sampled,
            sequence_tokens=self._sequence,
            turns=self._turns,
            queue_s=self._queue_s,
            boot_s=self._boot_s,
            generate_s=sum(turn.generate_s for turn in self._turns),
            act_s=sum(turn.act_s for turn in self._turns),
            verify_s=self._verify_s,
            started_at=self._started_at,
            ended_at=workflow.now().timestamp(),
        )

    def _show(self, record: EpisodeRecord) -> None:
        workflow.upsert_search_attributes(
            [OUTCOME.value_set(record.outcome.value), STOP_REASON.value_set(record.stop_reason.value)]
        )
        if record.max_version is not None:
            workflow.upsert_search_attributes([POLICY_VERSION.value_set(record.max_version)])
        if record.reward is not None:
            workflow.upsert_search_attributes([REWARD.value_set(record.reward)])
        self._transcript.ended(record)


def _lost(error: ActivityError, boundary: Boundary) -> _Ended:
    """The ending that a failed call means. Raises the error itself when it is our own cancellation."""
    if is_cancelled_exception(error):
        raise error
    return _Ended(*stop_reason_of(error, boundary))


def _turn_record(turn: int, out: GenerateOutput) -> TurnRecord:
    action = {ActionKind.COMMAND: out.action.command, ActionKind.FINAL: f"Answer: {out.action.answer}"}
    return TurnRecord(
        turn=turn,
        segment=out.segment,
        engine=out.engine,
        prompt_tokens=out.prompt_tokens,
        sampled_tokens=out.sampled_tokens,
        cached_tokens=out.cached_tokens,
        min_version=out.min_version,
        max_version=out.max_version,
        finish_reason=out.finish_reason,
        action=shorten(action.get(out.action.kind, f"malformed: {out.action.error}"), 200),
        generate_s=out.timing.run_s,
        queue_s=out.timing.queue_s,
    )
