"""Evaluation: held-out tasks under one policy version, on engines that all serve it alike.

Owns the result of an evaluation. A run starts one as its child; `temporal workflow start --type Evaluation` or a
schedule starts one of any published version, with the dict of workflows/evaluation_request.py. It asks the engines what
they serve, before the first episode and after the last, and refuses a result where they differ, or where the weights
are not the same in the end. Episodes are pinned to the version: one whose tokens are of another does not count, the
engines are brought back, and it is played again. What infrastructure broke is replaced; a bounded number of episodes
goes on at once; the row is written before it returns.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, FailureError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from workflows import policies
    from workflows.attempts import play
    from workflows.attributes import POLICY_VERSION, REWARD, RUN
    from workflows.contracts import (
        CloseEvaluationInput,
        EpisodeInput,
        EpisodeKind,
        EpisodeSummary,
        EvaluationInput,
        EvaluationRecord,
        EvaluationResult,
        EvaluationState,
        FailureType,
        FingerprintOutput,
        Measured,
        OpenEvaluationInput,
        RecordedEvaluation,
        StopReason,
        TaskRef,
        derive_seed,
        fingerprint_digest,
    )
    from workflows.evaluation_engines import EvaluationEngines, Refused, require_unchanged
    from workflows.evaluation_request import EvaluationRequest, parse_evaluation
    from workflows.failures import failure_type, sentence

MAX_ATTEMPTS = 4
"""Attempts at one episode that infrastructure may take."""
MAX_REDONE = 3
"""Attempts at one episode that may turn out to be of other weights."""


@workflow.defn(name="Evaluation")
class Evaluation:
    def __init__(self) -> None:
        self._done = 0
        self._redone = 0

    @property
    def _input(self) -> EvaluationInput:
        return self._engines.input

    @workflow.run
    async def run(self, input: Any = None) -> EvaluationResult:
        """`input`: an EvaluationInput of a run, or the request of a person as a dict."""
        asked = _read(input)
        if isinstance(asked, EvaluationRequest):
            return await self._alone(asked)
        self._engines = EvaluationEngines(asked)
        return await (self._measure() if asked.engines else self._unpinned())

    # --- one that was asked for -----------------------------------------------------------------------------------

    async def _alone(self, request: EvaluationRequest) -> EvaluationResult:
        """Raises ApplicationError where there is no result, with the reason."""
        try:
            await self._open(request)
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            raise ApplicationError(sentence(error), type=failure_type(error), non_retryable=True) from error
        workflow.upsert_search_attributes([RUN.value_set(self._input.run)])
        try:
            if await self._engines.lease():
                # The run that had the engines has newer versions now, and may have removed the one that was newest.
                await self._open(request)
            if not self._input.quantization:
                await self._engines.serve()
            result = await self._measure(pin=True)
        except (asyncio.CancelledError, FailureError) as error:
            cancelled = is_cancelled_exception(error)
            reason = "cancelled by request" if cancelled else sentence(error)
            await self._close(EvaluationState.CANCELLED if cancelled else EvaluationState.FAILED, reason)
            if cancelled:
                raise
            raise ApplicationError(reason, type=failure_type(error), non_retryable=True) from error
        await self._close(EvaluationState.REFUSED if result.refused else EvaluationState.FINISHED, result.refused)
        if result.refused:
            raise ApplicationError(result.refused, type=FailureType.EVALUATION, non_retryable=True)
        return result

    async def _open(self, request: EvaluationRequest) -> None:
        info = workflow.info()
        input = await policies.call(
            "open_evaluation",
            OpenEvaluationInput(
                workflow_id=info.workflow_id,
                execution=info.first_execution_run_id,
                request=request.model_dump(mode="json"),
            ),
            EvaluationInput,
            policies.CHECK,
            summary="check run, weights, taskset, engines",
        )
        self._engines = EvaluationEngines(input)

    async def _close(self, state: EvaluationState, reason: str) -> None:
        """Write the end, free the engines. They were the evaluation's alone, so that this must not fail."""
        await policies.call(
            "close_evaluation",
            CloseEvaluationInput(workflow_id=workflow.info().workflow_id, state=state, reason=reason),
            type(None),
            policies.LINEAGE,
            summary=state,
        )

    # --- on pinned engines ----------------------------------------------------------------------------------------

    async def _measure(self, *, pin: bool = False) -> EvaluationResult:
        """The result, or one that says why it is refused. `pin`: bring the engines to the version first."""
        started_at = workflow.now().timestamp()
        seen = FingerprintOutput()
        try:
            if pin:
                await self._engines.pin()
            seen = await self._engines.fingerprint("before the first episode")
            rewards = await self._play_all()
            require_unchanged(seen, await self._engines.fingerprint("after the last episode"))
            result = self._result(rewards).model_copy(update={"fingerprint": fingerprint_digest(seen.fields)})
        except Refused as error:
            input = self._input
            result = EvaluationResult(version=input.version, episodes=0, mean_reward=0.0, refused=str(error))
            workflow.set_current_details(f"refused: {error}")
        return await self._record(result.model_copy(update={"redone": self._redone}), seen, started_at)

    async def _record(self, result: EvaluationResult, seen: FingerprintOutput, started_at: float) -> EvaluationResult:
        input = self._input
        measured = Measured(
            evaluation_id=input.evaluation_id,
            workflow_id=workflow.info().workflow_id,
            in_run=not input.name,
            state=EvaluationState.REFUSED if result.refused else EvaluationState.FINISHED,
            reason=result.refused,
            model=input.model,
            taskset=input.tasks[0].taskset if input.tasks else "",
            tasks=len(input.tasks),
            samples_per_task=input.samples_per_task,
            seed=input.seed,
            manifest=input.manifest,
            fields=seen.fields,
            engines=seen.engines,
            left_out=seen.left_out,
            redone=result.redone,
            started_at=started_at,
        )
        recorded = await policies.call_optional(
            "record_evaluation",
            EvaluationRecord(run=input.run, result=result, measured=measured),
            RecordedEvaluation,
            policies.LINEAGE,
            summary=_summary(result),
        )
        if result.refused:
            return result
        _show(result)
        return result.model_copy(update={"low": recorded.low, "high": recorded.high}) if recorded else result

    # --- as histories have it that are older than fingerprints ----------------------------------------------------

    async def _unpinned(self) -> EvaluationResult:
        result = self._result(await self._play_all())
        await policies.call(
            "record_evaluation",
            EvaluationRecord(run=self._input.run, result=result),
            type(None),
            policies.LINEAGE,
            summary=_summary(result),
        )
        _show(result)
        return result

    # --- the episodes ---------------------------------------------------------------------------------------------

    async def _play_all(self) -> dict[str, list[float]]:
        """Rewards by kind of task. Raises Refused."""
        input = self._input
        self._slots = asyncio.Semaphore(input.concurrency)
        episodes = [
            asyncio.ensure_future(self._episode(index * input.samples_per_task + sample, task))
            for index, task in enumerate(input.tasks)
            for sample in range(input.samples_per_task)
        ]
        rewards: dict[str, list[float]] = defaultdict(list)
        try:
            for kind, reward in await asyncio.gather(*episodes):
                if reward is not None:
                    rewards[kind].append(reward)
        except Refused:
            for episode in episodes:
                episode.cancel()
            await asyncio.gather(*episodes, return_exceptions=True)
            raise
        return rewards

    def _result(self, rewards: dict[str, list[float]]) -> EvaluationResult:
        flat = [reward for kind in rewards.values() for reward in kind]
        return EvaluationResult(
            version=self._input.version,
            episodes=len(flat),
            mean_reward=sum(flat) / len(flat) if flat else 0.0,
            by_kind={kind: sum(values) / len(values) for kind, values in sorted(rewards.items())},
            excluded=self._total - len(flat),
        )

    @property
    def _total(self) -> int:
        return len(self._input.tasks) * self._input.samples_per_task

    async def _episode(self, index: int, task: TaskRef) -> tuple[str, float | None]:
        """(kind of task, reward) of one held-out episode; no reward when infrastructure took all its attempts.

        Raises Refused where its attempts keep being of other weights."""
        kind = task.task_id.rsplit("-", 1)[0]
        lost = foreign = 0
        async with self._slots:
            while lost < MAX_ATTEMPTS:
                pins = self._engines.pins
                summary = await self._attempt(index, lost + foreign, task)
                if summary.valid and self._is_of_the_version(summary):
                    self._progress()
                    return kind, summary.reward
                if summary.valid:
                    foreign += 1
                    self._redone += 1
                    if foreign > MAX_REDONE:
                        raise Refused(
                            f"weights change under it: {foreign} attempts at {self._input.evaluation_id}/e{index} are"
                            f" of versions {summary.min_version} to {summary.max_version}, not {self._input.version}"
                        )
                else:
                    lost += 1
                if self._input.engines and (summary.valid or summary.stop_reason is StopReason.ENGINE_LOST):
                    await self._engines.pin_again(pins)
        self._progress()
        return kind, None

    def _is_of_the_version(self, summary: EpisodeSummary) -> bool:
        """True of one without a token, too, and of all where nothing is pinned."""
        versions = {summary.min_version, summary.max_version} - {None}
        return not self._input.engines or versions <= {self._input.version}

    async def _attempt(self, index: int, attempt: int, task: TaskRef) -> EpisodeSummary:
        input = self._input
        episode = EpisodeInput(
            run=input.run,
            group_id=input.evaluation_id,
            index=index,
            attempt=attempt,
            kind=EpisodeKind.EVALUATION,
            model=input.model,
            task=task,
            limits=input.limits,
            seed=derive_seed(input.seed, "evaluation", index),
            priority=-1,
            pinned_version=input.version if input.engines else None,
        )
        return await play(episode)

    def _progress(self) -> None:
        self._done += 1
        again = f", {self._redone} attempts of other weights played again" if self._redone else ""
        workflow.set_current_details(f"version {self._input.version}: {self._done} of {self._total} episodes{again}")


def _read(raw: Any) -> EvaluationInput | EvaluationRequest:
    """Raises ApplicationError naming the fields that are wrong."""
    if isinstance(raw, EvaluationInput):
        return raw
    try:
        if isinstance(raw, dict) and isinstance(raw.get("tasks"), list):
            return EvaluationInput.model_validate(raw)
        return parse_evaluation(raw)
    except ValueError as error:
        raise ApplicationError(str(error), type=FailureType.INVALID_CONFIG, non_retryable=True) from None


def _summary(result: EvaluationResult) -> str:
    if result.refused:
        return f"version {result.version}: refused: {result.refused}"
    return f"version {result.version}: mean reward {result.mean_reward:.3f} over {result.episodes}"


def _show(result: EvaluationResult) -> None:
    workflow.upsert_search_attributes([POLICY_VERSION.value_set(result.version), REWARD.value_set(result.mean_reward)])
