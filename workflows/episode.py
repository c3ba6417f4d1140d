"""Episode: one attempt at a task: acquire, (generate, act)*, verify, record, release.

Owns the order of things and the ending; promises that every ending is classified (it never raises for a failure that
the table knows), that the sandbox is released whatever happens, and that the attempt's row is written before it
reports. Runs as a child of Group or Evaluation, on the queue of its activities. A parent that needs it no more says so
by signal: it then ends at once as surplus, with the turns that it had made.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from temporalio import workflow
from temporalio.common import SearchAttributeUpdate
from temporalio.exceptions import ActivityError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from workflows import policies
    from workflows.attempt_agent import run_agent
    from workflows.attempt_sandbox import AttemptSandbox
    from workflows.attributes import OUTCOME, POLICY_VERSION, REWARD, STOP_REASON, shorten
    from workflows.contracts import (
        EXTERNAL_HARNESS,
        Action,
        ActionKind,
        ActOutput,
        EpisodeInput,
        EpisodeRecord,
        EpisodeSummary,
        FinishReason,
        GenerateInput,
        GenerateOutput,
        Sampling,
        StopReason,
        TurnRecord,
        VerifyOutput,
        derive_seed,
    )
    from workflows.ending import Ended, ended_by
    from workflows.outcome import Boundary, judge, needs_verdict
    from workflows.transcript import Transcript


PROGRAM_ELSEWHERE = (
    "harness external needs sandboxes on the rollout worker's own machine, and RATCHET_SANDBOX_HOSTS names hosts of"
    " their own; take harness shell or tools there"
)
SURPLUS = "others were enough before it had ended"
ACTION_BYTES = 80
"""What a turn's row keeps of its action: the rows of a hundred turns go into one message."""


@workflow.defn(name="Episode", failure_exception_types=[Exception])
class Episode:
    def __init__(self) -> None:
        self._turns: list[TurnRecord] = []
        self._answer = ""
        self._sampled = 0
        self._sequence = 0
        self._queue_s = 0.0
        self._playing: asyncio.Task[tuple[StopReason, str, VerifyOutput | None]] | None = None
        self._surplus = False

    @workflow.signal
    def surplus(self) -> None:
        """Others were enough. Once the verdict is there this comes too late."""
        self._surplus = True
        if self._playing is not None:
            self._playing.cancel()

    @workflow.run
    async def run(self, input: EpisodeInput) -> EpisodeSummary:
        self._input = input
        self._transcript = Transcript(input.attempt_id, input.task.task_id)
        self._sandbox = AttemptSandbox(input, self._transcript)
        self._started_at = workflow.now().timestamp()
        self._playing = asyncio.create_task(self._play_and_verify())
        try:
            reason, why, verdict = await self._playing
            if verdict is None and workflow.cancellation_reason() is not None:
                # A call that failed under the cancellation: the run's own end takes sandboxes away.
                raise asyncio.CancelledError
        except (Exception, asyncio.CancelledError) as error:
            ours = self._surplus and is_cancelled_exception(error) and workflow.cancellation_reason() is None
            if not ours:
                await self._sandbox.release()
                raise
            reason, why, verdict = StopReason.SURPLUS, SURPLUS, None
        record = self._record(reason, why, verdict)
        released = asyncio.create_task(self._sandbox.release())
        try:
            summary = f"{record.outcome}: {shorten(record.why)}"
            await policies.call("record_episode", record, type(None), policies.LINEAGE, summary=summary)
        except ActivityError as error:
            record = _unrecorded(record, ended_by(error, Boundary.STORAGE))
        finally:
            # Also when the record is refused before it is sent, as one that is too large.
            await released
        self._show(record)
        return EpisodeSummary(**{name: getattr(record, name) for name in EpisodeSummary.model_fields})

    async def _play_and_verify(self) -> tuple[StopReason, str, VerifyOutput | None]:
        """The ending, why, and the verdict where the ending has one."""
        external = self._input.limits.harness == EXTERNAL_HARNESS
        reason, why = await (self._play_program() if external else self._play())
        if not needs_verdict(reason):
            return reason, why, None
        verdict, reason, why = await self._verify(reason, why)
        return reason, why, verdict

    # --- the turns ------------------------------------------------------------------------------------------------

    async def _play(self) -> tuple[StopReason, str]:
        """Turns until the attempt ends; the ending and why. The sandbox boots while the first answer is made."""
        boot = asyncio.create_task(self._sandbox.acquire())
        try:
            observation: str | None = None
            reminders = 0
            for turn in range(self._input.limits.max_turns):
                self._check_wanted()
                answer = await self._generate(turn, observation)
                match answer.action.kind:
                    case ActionKind.FINAL:
                        self._answer = answer.action.answer
                        raise Ended(StopReason.FINISHED, f"answered {shorten(self._answer)!r}")
                    case ActionKind.MALFORMED if answer.finish_reason is FinishReason.LENGTH:
                        raise Ended(StopReason.MAX_TOKENS, f"turn {turn} was cut at its token budget")
                    case ActionKind.MALFORMED if reminders == self._input.limits.malformed_reminders:
                        raise Ended(StopReason.MALFORMED_ACTION, answer.action.error)
                    case ActionKind.MALFORMED:
                        reminders += 1
                        observation = answer.action.error
                        self._transcript.note(turn, observation)
                    case ActionKind.COMMAND:
                        await boot
                        self._check_wanted()
                        result = await self._act(turn, answer.action)
                        observation = result.observation()
            raise Ended(StopReason.MAX_TURNS, f"{self._input.limits.max_turns} turns are spent")
        except Ended as end:
            if self._surplus:
                await _given_up(boot)
                return StopReason.SURPLUS, SURPLUS
            # The verdict, or the release, needs to know the sandbox.
            with suppress(Ended):
                await boot
            if self._surplus:
                return StopReason.SURPLUS, SURPLUS
            return (end.reason, end.why) if self._sandbox.lease else await self._boot_failure(boot, end)
        except (ActivityError, asyncio.CancelledError):
            await _given_up(boot)
            raise

    async def _play_program(self) -> tuple[StopReason, str]:
        """The turns are the program's to take, once the sandbox is there; the ending and why."""
        try:
            await self._sandbox.acquire()
            self._check_wanted()
            assert self._sandbox.lease is not None
            if self._sandbox.lease.queue:
                raise Ended(StopReason.UNDETERMINED, PROGRAM_ELSEWHERE)
            out = await run_agent(self._input, self._sandbox.lease, self._started_at)
        except Ended as end:
            return (StopReason.SURPLUS, SURPLUS) if self._surplus else (end.reason, end.why)
        if self._surplus:
            return StopReason.SURPLUS, SURPLUS
        self._turns, self._answer = out.turns, out.answer
        self._sampled, self._sequence = out.sampled_tokens, out.sequence_tokens
        self._queue_s += out.timing.queue_s
        self._sandbox.command_s = out.command_s
        self._sandbox.evidence = out.evidence
        for record in out.turns:
            self._transcript.called(record)
        return out.stop_reason, out.why

    def _check_wanted(self) -> None:
        """Raises Ended where the cancellation by `surplus` met a call that ended all the same."""
        if self._surplus:
            raise Ended(StopReason.SURPLUS, SURPLUS)

    async def _boot_failure(self, boot: asyncio.Task[None], end: Ended) -> tuple[StopReason, str]:
        """An engine's failure stands; any other ending without a sandbox is the sandbox's loss."""
        if not needs_verdict(end.reason):
            return end.reason, end.why
        failure = boot.exception()
        return (failure.reason, failure.why) if isinstance(failure, Ended) else (end.reason, end.why)

    async def _generate(self, turn: int, observation: str | None) -> GenerateOutput:
        limits = self._input.limits
        left = min(limits.max_tokens_per_turn, limits.max_tokens - self._sampled)
        if left <= 0:
            raise Ended(StopReason.MAX_TOKENS, f"{limits.max_tokens} sampled tokens are spent")
        message = GenerateInput(
            run=self._input.run,
            attempt_id=self._input.attempt_id,
            session=self._input.attempt_id,
            turn=turn,
            model=self._input.model,
            task=self._input.task,
            segments=[record.segment for record in self._turns if record.segment is not None],
            observation=observation,
            sampling=Sampling(
                temperature=limits.temperature,
                max_tokens=left,
                context_length=limits.context_length,
                top_p=limits.top_p,
                top_k=limits.top_k,
                min_p=limits.min_p,
            ),
            seed=derive_seed(self._input.seed, turn),
            priority=self._input.priority,
            started_at=self._started_at,
            timeout_s=limits.generate_timeout_s,
            kv=limits.kv,
            harness=limits.harness,
            pinned_version=self._input.pinned_version,
        )
        try:
            out = await policies.call(
                "generate",
                message,
                GenerateOutput,
                policies.GENERATE,
                summary=self._transcript.summary(turn),
            )
        except ActivityError as error:
            raise ended_by(error, Boundary.ENGINE) from error
        if out.finish_reason is FinishReason.CONTEXT_FULL:
            raise Ended(
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
        timeout = min(limits.step_timeout_s, limits.time_budget_s - self._sandbox.command_s)
        out = await self._sandbox.act(turn, action.command, timeout)
        self._turns[-1] = self._turns[-1].model_copy(
            update={
                "exit_code": out.exit_code,
                "timed_out": out.timed_out,
                "output_digest": out.output_digest,
                "act_s": out.timing.run_s,
            }
        )
        self._transcript.acted(turn, out)
        if out.sandbox_broken:
            raise Ended(StopReason.SANDBOX_KILLED_BY_AGENT, out.sandbox_broken)
        spent = self._sandbox.command_s
        if spent >= limits.time_budget_s or (out.timed_out and timeout < limits.step_timeout_s):
            raise Ended(StopReason.TIME_BUDGET, f"its commands ran {spent:.1f} s")
        return out

    # --- the ending -----------------------------------------------------------------------------------------------

    async def _verify(self, reason: StopReason, why: str) -> tuple[VerifyOutput | None, StopReason, str]:
        try:
            out = await self._sandbox.verify(self._answer, f"verify {self._input.task.task_id}: {reason}")
        except Ended as end:
            return None, end.reason, end.why
        self._transcript.verified(out)
        if out.tampered:
            return out, StopReason.TAMPERED, out.detail
        return out, reason, f"{why}; {out.detail}" if out.detail else why

    def _record(self, reason: StopReason, why: str, verdict: VerifyOutput | None) -> EpisodeRecord:
        input, sandbox = self._input, self._sandbox
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
            image_id=sandbox.lease.image_id if sandbox.lease else "",
            host=sandbox.lease.host if sandbox.lease else "",
            evidence=sandbox.evidence,
            replays=sandbox.replays,
            seed=input.seed,
            min_version=min((turn.min_version for turn in self._turns), default=None),
            max_version=max((turn.max_version for turn in self._turns), default=None),
            sampled_tokens=self._sampled,
            sequence_tokens=self._sequence,
            turns=self._turns,
            queue_s=self._queue_s + sandbox.queue_s,
            boot_s=sandbox.boot_s,
            generate_s=sum(turn.generate_s for turn in self._turns),
            act_s=sum(turn.act_s for turn in self._turns),
            verify_s=sandbox.verify_s,
            started_at=self._started_at,
            ended_at=workflow.now().timestamp(),
        )

    def _show(self, record: EpisodeRecord) -> None:
        # Together: each upsert is an event and a write to the server's visibility store.
        updates: list[SearchAttributeUpdate[Any]] = [
            OUTCOME.value_set(record.outcome.value),
            STOP_REASON.value_set(record.stop_reason.value),
        ]
        if record.max_version is not None:
            updates.append(POLICY_VERSION.value_set(record.max_version))
        if record.reward is not None:
            updates.append(REWARD.value_set(record.reward))
        workflow.upsert_search_attributes(updates)
        self._transcript.ended(record)


async def _given_up(boot: asyncio.Task[None]) -> None:
    """Cancel it and wait for its end, whatever that is."""
    boot.cancel()
    with suppress(Ended, ActivityError, asyncio.CancelledError):
        await boot


def _unrecorded(record: EpisodeRecord, end: Ended) -> EpisodeRecord:
    """The record of an attempt whose row can't be written: without it nothing may train on it."""
    judgement = judge(end.reason, None, 0.0)
    changes = {"stop_reason": end.reason, "why": shorten(end.why, 400)}
    return record.model_copy(update=changes | {"outcome": judgement.outcome, "reward": judgement.reward})


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
        asked_at=out.asked_at,
        finish_reason=out.finish_reason,
        action=shorten(action.get(out.action.kind, f"malformed: {out.action.error}"), ACTION_BYTES),
        generate_s=out.timing.run_s,
        queue_s=out.timing.queue_s,
    )
