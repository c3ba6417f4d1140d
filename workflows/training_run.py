"""TrainingRun: admit groups, cut a batch, update, publish, apply, evaluate; continue-as-new at step boundaries.

The one long-lived workflow of a run; its workflow id is the run's name. It takes the raw JSON and validates it inside,
so that a mistake ends the run at once with the field named. Every loop is bounded or waits for a message; what it
knows crosses continue-as-new in one Carry. On every way out it ends its groups, sweeps what is left and closes its row.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, FailureError, TemporalError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from workflows import policies, policy_update, weight_sync
    from workflows.admission import Admission, lost_group, lost_groups
    from workflows.attributes import POLICY_VERSION, REWARD, RUN
    from workflows.config import RunConfig, parse_run_config
    from workflows.contracts import (
        ChangeTasksInput,
        ChangeTasksOutput,
        CloseRunInput,
        FailureType,
        GroupResult,
        OpenRunInput,
        OpenRunOutput,
        QuarantineOrder,
        Queue,
        RunProgress,
        RunState,
        RunStatus,
        SiblingsLeft,
        SweepInput,
        SweepOutput,
        TaskChange,
        sandbox_queue,
    )
    from workflows.failures import failure_type, sentence
    from workflows.run_state import Carry, progress_markdown, starting_status
    from workflows.task_changes import change_tasks, parse_request, run_is_over

WATCHDOG_S = 60.0
"""Without a report for so long (doubling up to ten times), the run asks whether its groups still live."""
STOP_LIMIT = timedelta(minutes=3)


@workflow.defn(name="TrainingRun")
class TrainingRun:
    def __init__(self) -> None:
        self._run = workflow.info().workflow_id
        self._carry: Carry | None = None
        self._admission: Admission | None = None
        self._early_reports: list[GroupResult] = []
        self._early_pause: bool | None = None
        self._early_orders: list[QuarantineOrder] = []
        self._reports = 0
        self._ended: RunState | None = None
        self._doing = "checking the configuration"
        self._reason = ""

    # --- messages -------------------------------------------------------------------------------------------------

    @workflow.signal
    def group_done(self, result: GroupResult) -> None:
        if self._carry is None:
            self._early_reports.append(result)
            return
        if self._carry.close(result, workflow.now().timestamp()):
            self._reports += 1
            self._show()

    @workflow.signal
    def siblings_left(self, word: SiblingsLeft) -> None:
        """Places are free for another group. One that comes between two executions is passed over."""
        if self._carry is not None:
            self._carry.pool.siblings_left(word.number, word.left)

    @workflow.signal
    def pause(self) -> None:
        """Hold admission and updates; groups in flight end."""
        self._set_paused(True)

    @workflow.signal
    def resume(self) -> None:
        self._set_paused(False)

    @workflow.signal
    def quarantine(self, order: QuarantineOrder) -> None:
        """Rewards were wrong: tasks are admitted no more, or again, and closed groups leave the pool."""
        if self._carry is None:
            self._early_orders.append(order)
            return
        self._carry.heed(order, workflow.now().timestamp())
        self._reports += 1
        self._show()

    @workflow.update
    async def add_tasks(self, request: Any = None) -> ChangeTasksOutput:
        """Tasks of the run's taskset, or of another, that it takes from now on as well."""
        return await self._change_tasks(TaskChange.ADDED, request)

    @add_tasks.validator
    def _may_be_added(self, request: Any = None) -> None:
        parse_request(request)

    @workflow.update
    async def retire_tasks(self, request: Any = None) -> ChangeTasksOutput:
        """Tasks that the run takes no more; their groups in flight end as ever."""
        return await self._change_tasks(TaskChange.RETIRED, request)

    @retire_tasks.validator
    def _may_be_retired(self, request: Any = None) -> None:
        parse_request(request)

    async def _change_tasks(self, change: TaskChange, request: Any) -> ChangeTasksOutput:
        await workflow.wait_condition(lambda: self._carry is not None or self._ended is not None)
        carry = self._carry
        if carry is None or self._ended is not None or not carry.wants_groups:
            raise run_is_over()
        number = carry.task_changes.requests
        carry.task_changes.requests += 1
        message = ChangeTasksInput(
            run=self._run,
            config=carry.config_json(),
            number=number,
            change=change,
            request=parse_request(request),
            policy_version=carry.policy_version,
            at=workflow.now().timestamp(),
        )
        out = await change_tasks(message)
        carry.task_changes.note(change, out.changed)
        if self._admission is not None:
            self._admission.tasks_changed()
        self._show()
        return out

    @workflow.query
    def status(self) -> RunStatus:
        if self._carry is None:
            return starting_status(self._run, self._ended or RunState.STARTING, self._reason, self._doing)
        return self._carry.status(self._run, self._state(), self._why(), self._doing)

    def _set_paused(self, paused: bool) -> None:
        self._early_pause = paused
        if self._carry is not None:
            self._carry.paused = paused
            self._show()

    # --- the run --------------------------------------------------------------------------------------------------

    @workflow.run
    async def run(self, config: Any = None, carry: Carry | None = None) -> RunStatus:
        parsed = self._validate(config) if carry is None else carry.config
        try:
            if carry is None:
                await self._open(parsed)
            else:
                self._adopt(carry)
            await self._train()
            # What is in flight would train nothing, and takes the machine from the evaluation.
            await self._end_groups(self._state_now)
            await policy_update.evaluate(self._run, self._state_now, self._say)
        except (asyncio.CancelledError, FailureError) as error:
            cancelled = is_cancelled_exception(error)
            self._reason = "cancelled by request" if cancelled else sentence(error)
            await self._stop(RunState.CANCELLED if cancelled else RunState.FAILED)
            if cancelled:
                raise
            raise ApplicationError(self._reason, type=failure_type(error), non_retryable=True) from error
        await self._stop(RunState.FINISHED)
        return self.status()

    def _validate(self, raw: Any) -> RunConfig:
        try:
            return parse_run_config(raw)
        except ValueError as error:
            raise ApplicationError(str(error), type=FailureType.INVALID_CONFIG, non_retryable=True) from None

    async def _open(self, config: RunConfig) -> None:
        workflow.upsert_search_attributes([RUN.value_set(self._run)])
        opened = await policies.call(
            "open_run",
            OpenRunInput(
                run=self._run,
                config=config.model_dump(mode="json"),
                execution=workflow.info().first_execution_run_id,
            ),
            OpenRunOutput,
            policies.CHECK,
            summary="check model, taskset, engines",
        )
        config = config.model_copy(update={"model": opened.model})
        carry = Carry(config=config, opened=opened, paused=bool(self._early_pause))
        self._adopt(carry)
        await policy_update.lease_engines(self._run, self._say)
        await policy_update.start_parts(self._run, carry, self._say)
        await weight_sync.publish_and_apply(self._run, carry, self._say)
        await self._record_progress()
        await policy_update.evaluate(self._run, carry, self._say)
        carry.batch_opened_at = workflow.now().timestamp()

    def _adopt(self, carry: Carry) -> None:
        self._carry = carry
        if self._early_pause is not None:
            # Signalled between two executions.
            carry.paused = self._early_pause
        for result in self._early_reports:
            self.group_done(result)
        self._early_reports.clear()
        for order in self._early_orders:
            self.quarantine(order)
        self._early_orders.clear()
        self._show()

    @property
    def _state_now(self) -> Carry:
        assert self._carry is not None
        return self._carry

    async def _train(self) -> None:
        carry = self._state_now
        steps, every = carry.config.training.steps, carry.config.evaluation.every
        admission = self._admission = Admission(self._run, carry)
        weighed: dict[int, int] = {}
        while carry.step < steps and await self._collect(admission):
            await policy_update.hold_out_divergent(self._run, carry, weighed, self._say)
            if not carry.pool.batch_is_ready(carry.rules):
                continue
            if not await policy_update.update(self._run, carry, self._say):
                continue
            await weight_sync.publish_and_apply(self._run, carry, self._say)
            await self._record_progress()
            carry.trained(workflow.now().timestamp())
            carry.steps_in_history += 1
            if every and carry.step % every == 0 and carry.step < steps:
                await policy_update.evaluate(self._run, carry, self._say)
            if carry.step < steps and self._history_is_long():
                await self._continue_as_new(admission)

    async def _collect(self, admission: Admission) -> bool:
        """Wait for a batch, however long an outage lasts. False when the taskset has nothing left to teach."""
        carry = self._state_now
        patience_s = WATCHDOG_S
        again = f" again: {carry.void_batches} in a row taught nothing" if carry.void_batches else ""
        self._say(f"collecting a batch{again}")
        while True:
            if admission.task.done():
                admission.task.result()
            if self._state() is not carry.row_state:
                await self._record_progress()
            if workflow.info().is_continue_as_new_suggested():
                await self._continue_as_new(admission)
            if not carry.paused:
                carry.drop_stale(workflow.now().timestamp())
                if carry.pool.batch_is_ready(carry.rules):
                    carry.empty_batches = 0
                    return True
                if carry.pool.give_up(carry.rules):
                    self._reason = carry.another_round()
                    if self._reason:
                        return False
            seen = self._reports

            def moved(seen: int = seen) -> bool:
                return self._reports != seen or self._state() is not carry.row_state or admission.task.done()

            try:
                await workflow.wait_condition(moved, timeout=patience_s)
                patience_s = WATCHDOG_S
            except TimeoutError:
                patience_s = min(2 * patience_s, 10 * WATCHDOG_S)
                for lost in await lost_groups(self._run, carry) if carry.pool.in_flight else []:
                    self.group_done(lost)

    def _history_is_long(self) -> bool:
        carry = self._state_now
        long_enough = carry.steps_in_history >= carry.config.continue_as_new_every
        return long_enough or workflow.info().is_continue_as_new_suggested()

    async def _continue_as_new(self, admission: Admission) -> None:
        """Groups in flight go on; their reports reach the next execution by workflow id."""
        carry = self._state_now
        await admission.close_down()
        await workflow.wait_condition(workflow.all_handlers_finished)
        carry.steps_in_history = 0
        workflow.continue_as_new(args=[None, carry])

    async def _stop(self, state: RunState) -> None:
        """End the groups in flight, sweep what they left, close the row. Failures here never hide the run's own end."""
        self._say("ending what is in flight")
        if self._carry is not None:
            await self._end_groups(self._carry)
            hosts = self._carry.opened.sandbox_hosts
            await asyncio.gather(*(self._sweep(queue) for queue in map(sandbox_queue, hosts)))
            if not hosts:
                await self._sweep(None)
        with suppress(ActivityError):
            await policies.call(
                "close_run",
                CloseRunInput(
                    run=self._run,
                    state=state,
                    reason=self._reason,
                    step=self._carry.step if self._carry else None,
                    policy_version=self._carry.policy_version if self._carry else None,
                ),
                type(None),
                policies.CLEAN_UP,
                summary=state,
            )
        self._ended = state
        self._say(state)

    async def _sweep(self, host: str | None) -> None:
        """What the run left behind the queue of a sandbox host; None: where the episodes' worker is."""
        policy = policies.CLEAN_UP.pinned() if host else policies.CLEAN_UP
        summary = "remove what the run left behind" + (f" on {host}" if host else "")
        with suppress(ActivityError):
            await policies.call(
                "sweep", SweepInput(run=self._run), SweepOutput, policy, summary=summary, queue=host or Queue.EPISODES
            )

    async def _end_groups(self, carry: Carry) -> None:
        if self._admission is not None:
            await self._admission.close_down()
        for number in list(carry.pool.in_flight):
            try:
                await workflow.get_external_workflow_handle(f"{self._run}/g{number}").cancel()
            except TemporalError:
                self.group_done(lost_group(self._run, number))
        with suppress(TimeoutError):
            await workflow.wait_condition(lambda: not carry.pool.in_flight, timeout=STOP_LIMIT)

    async def _record_progress(self) -> None:
        carry = self._state_now
        carry.row_state = self._state()
        workflow.upsert_search_attributes([POLICY_VERSION.value_set(carry.policy_version)])
        if carry.reward is not None:
            workflow.upsert_search_attributes([REWARD.value_set(carry.reward)])
        await policies.call(
            "record_progress",
            RunProgress(
                run=self._run,
                state=carry.row_state,
                step=carry.step,
                policy_version=carry.policy_version,
                reason=self._why(),
            ),
            type(None),
            policies.LINEAGE,
            summary=f"step {carry.step}, {carry.row_state}",
        )

    # --- what people see ------------------------------------------------------------------------------------------

    def _state(self) -> RunState:
        if self._ended is not None:
            return self._ended
        if self._carry is None:
            return RunState.STARTING
        if self._carry.paused:
            return RunState.PAUSED
        return RunState.DEGRADED if self._carry.pool.degraded else RunState.RUNNING

    def _why(self) -> str:
        return self._state_now.why_degraded() if self._state() is RunState.DEGRADED else self._reason

    def _say(self, doing: str) -> None:
        self._doing = doing
        self._show()

    def _show(self) -> None:
        workflow.set_current_details(progress_markdown(self.status()))
