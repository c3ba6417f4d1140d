"""What a worker's activities say of a run, as metrics beside the SDK's own.

Owns their names and labels, and how each is read from the messages of an activity that ended: no activity knows of it.
A metric of design.md is `ratchet_` and its name with an underscore for every slash and dash: `off_policy/steps` is
`ratchet_off_policy_steps`. A family whose members make up one whole is one metric with a label: `outcome/<name>` is
`ratchet_outcome_total{outcome="<name>"}`, a part of `time/to_trainable_batch` is `ratchet_time_part{part="<name>"}`.
Seconds, shares and counts as in the rows; a gauge has the last value of its run. Counters count the ends of activities,
of which a retry may repeat one: the rows know better. docs/deployment.md has the table for people.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from temporalio import activity
from temporalio.common import MetricGaugeFloat, MetricMeter
from temporalio.exceptions import ApplicationError
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput, Interceptor

from workflows.contracts import (
    AcquireOutput,
    ActOutput,
    ApplyInput,
    ApplyOutput,
    BatchWait,
    CloseRunInput,
    EpisodeRecord,
    EvaluationRecord,
    GroupResult,
    PublishInput,
    PublishOutput,
    ReserveBatchInput,
    ReserveBatchOutput,
    RunProgress,
    RunState,
    UpdateInput,
    UpdateOutput,
)
from workflows.outcome import TABLE, Rule

if TYPE_CHECKING:
    from activities.generation.routing import EnginePool
    from activities.sandbox.docker import DockerBackend

log = logging.getLogger(__name__)

PREFIX = "ratchet_"
BUCKETS: Mapping[str, Sequence[float]] = {
    f"{PREFIX}episode_seconds": (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000),
    f"{PREFIX}command_seconds": (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
}
"""Upper ends of the histograms' buckets, in seconds."""
SAMPLE_EVERY_S = 5.0


class Sample(NamedTuple):
    """One gauge's value now. Example: `Sample("engine/requests", 3, {"engine": "local-e0"})`."""

    name: str
    value: float
    labels: dict[str, str]


Source = Callable[[], Awaitable[Sequence[Sample]]]


def legal(name: str) -> str:
    """A metric's name as Prometheus takes it. Example: `mismatch_kl/mean` -> `ratchet_mismatch_kl_mean`."""
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name)


class Meters:
    """Instruments by name, made when they are first used. Values that are not finite are left out."""

    def __init__(self, meter: MetricMeter) -> None:
        self._meter = meter
        self._made: dict[str, Any] = {}

    def set(self, name: str, value: float | None, **labels: str) -> None:
        if value is None or not math.isfinite(value):
            return
        gauge: MetricGaugeFloat = self._once(name, self._meter.create_gauge_float)
        if value >= 0:
            gauge.set(value, labels)
            return
        # The SDK refuses what its core takes, and a loss may well be negative.
        with_labels: Any = gauge.with_additional_attributes(labels)
        with_labels._core_metric._ref.set(value, with_labels._core_attrs._ref)

    def add(self, name: str, count: int, **labels: str) -> None:
        self._once(f"{name}_total", self._meter.create_counter).add(count, labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        if math.isfinite(value):
            self._once(name, self._meter.create_histogram_float).record(max(0.0, value), labels)

    def _once(self, name: str, make: Callable[[str], Any]) -> Any:
        if name not in self._made:
            self._made[name] = make(legal(name))
        return self._made[name]


class Recorder:
    """Reads the metrics out of what an activity was given and what it answered."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        self._by_message: dict[type, Callable[[Any, Any], None]] = {
            EpisodeRecord: self._episode,
            GroupResult: self._group,
            ReserveBatchInput: self._batch,
            UpdateInput: self._update,
            PublishInput: self._publish,
            ApplyInput: self._apply,
            RunProgress: self._progress,
            CloseRunInput: self._closed,
            EvaluationRecord: self._evaluation,
        }
        self._by_answer: dict[type, Callable[[Any], None]] = {AcquireOutput: self._acquired, ActOutput: self._acted}

    def ended(self, name: str, arguments: Sequence[Any], answer: Any) -> None:
        """An activity has ended well."""
        self._meters.add("activities", 1, activity=name, ended="ok")
        message = arguments[0] if arguments else None
        if read := self._by_message.get(type(message)):
            read(message, answer)
        elif tell := self._by_answer.get(type(answer)):
            tell(answer)

    def failed(self, name: str, error: BaseException) -> None:
        """A try of an activity has failed; `ended` is the failure's type, which names the boundary that was crossed."""
        kind = error.type if isinstance(error, ApplicationError) and error.type else type(error).__name__
        self._meters.add("activities", 1, activity=name, ended=kind)

    # --- rollout --------------------------------------------------------------------------------------------------

    def _episode(self, record: EpisodeRecord, answer: None) -> None:
        lost = TABLE[record.stop_reason] is Rule.INFRA
        whose = {"run": record.run, "kind": record.kind.value}
        self._meters.add(
            "outcome",
            1,
            outcome=record.outcome.value,
            stop_reason=record.stop_reason.value,
            boundary=record.stop_reason.removesuffix("_lost") if lost else "none",
            **whose,
        )
        self._meters.observe("episode_seconds", record.ended_at - record.started_at, kind=record.kind.value)
        self._meters.add("turns", len(record.turns), **whose)
        self._meters.add("tokens", record.sampled_tokens, what="sampled", **whose)
        self._meters.add("tokens", sum(turn.prompt_tokens for turn in record.turns), what="prompt", **whose)
        self._meters.add("tokens", sum(turn.cached_tokens for turn in record.turns), what="cached", **whose)
        self._meters.add("sandbox_replays", record.replays, run=record.run)

    def _group(self, result: GroupResult, answer: Any) -> None:
        run = result.group_id.rpartition("/")[0]
        self._meters.add("groups/closed", 1, run=run, reason=result.reason or "eligible")
        self._meters.add("groups/replaced_attempts", result.replaced, run=run)

    def _acquired(self, answer: AcquireOutput) -> None:
        started = "warm" if answer.warm else "cold"
        self._meters.add("sandbox_acquired", 1, started=started, prepared="forked" if answer.forked else "set up")

    def _acted(self, answer: ActOutput) -> None:
        self._meters.observe("command_seconds", answer.command_s)

    # --- control --------------------------------------------------------------------------------------------------

    def _batch(self, message: ReserveBatchInput, answer: ReserveBatchOutput) -> None:
        run = message.run
        wait = answer.wait or BatchWait(seconds=math.nan)
        self._meters.set("time/to_trainable_batch", wait.seconds, run=run)
        for part, seconds in wait.parts.items():
            self._meters.set("time/part", seconds, run=run, part=part)
        if answer.wait:
            self._meters.set("time/median", wait.median_s, run=run)
            self._meters.set("time/tail", wait.tail_s, run=run)
        self._meters.set("reward/batch", answer.reward, run=run)
        for reason, numbers in message.dropped.items():
            self._meters.add("groups/dropped", len(numbers), run=run, reason=reason)

    def _progress(self, message: RunProgress, answer: None) -> None:
        self._run(message.run, message.state, message.step, message.policy_version)

    def _closed(self, message: CloseRunInput, answer: None) -> None:
        self._run(message.run, message.state, message.step, message.policy_version)

    def _run(self, run: str, now: RunState, step: int | None, version: int | None) -> None:
        for state in RunState:
            self._meters.set("run_state", float(state is now), run=run, state=state.value)
        self._meters.set("step", step, run=run)
        self._meters.set("policy_version", version, run=run)

    def _evaluation(self, message: EvaluationRecord, answer: None) -> None:
        self._meters.set("evaluation/mean_reward", message.result.mean_reward, run=message.run)
        self._meters.set("evaluation/version", message.result.version, run=message.run)

    # --- trainer and engines --------------------------------------------------------------------------------------

    def _update(self, message: UpdateInput, answer: UpdateOutput) -> None:
        run = message.run
        self._meters.add("batches", 1, run=run, state="void" if answer.void else "trained")
        for name, value in answer.metrics.items():
            self._meters.set(name, value, run=run)
        self._meters.set("update_warning", float(bool(answer.warning)), run=run)
        self._meters.set("seconds/update_total", answer.timing.run_s, run=run)

    def _publish(self, message: PublishInput, answer: PublishOutput) -> None:
        run, seconds = message.run, dict(answer.seconds)
        total = seconds.pop("total", sum(seconds.values()))
        self._meters.set("weight_sync/publish_latency_s", total, run=run)
        for part, value in seconds.items():
            self._meters.set("weight_sync/publish_part_s", value, run=run, part=part)
        self._meters.set("weight_sync/bytes", answer.bytes, run=run)
        self._meters.set("weight_sync/published_version", answer.version, run=run)

    def _apply(self, message: ApplyInput, answer: ApplyOutput) -> None:
        where = {"run": message.run, "engine": answer.engine}
        self._meters.add("weight_sync/loads", 1, proven=str(answer.proven).lower(), **where)
        self._meters.set("weight_sync/pause_s", answer.pause_s, **where)
        for part, value in answer.seconds.items():
            self._meters.set("weight_sync/load_part_s", value, part=part, **where)
        if answer.proven:
            self._meters.set("weight_sync/served_version", answer.version, **where)
            self._meters.set("weight_sync/canary_max_abs", answer.canary_max_abs, **where)


class _Measured(ActivityInboundInterceptor):
    def __init__(self, next: ActivityInboundInterceptor, recorder: Recorder) -> None:
        super().__init__(next)
        self._recorder = recorder

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        name = activity.info().activity_type
        try:
            answer = await super().execute_activity(input)
        except Exception as error:
            _shielded(self._recorder.failed, name, error)
            raise
        _shielded(self._recorder.ended, name, input.args, answer)
        return answer


class MetricsInterceptor(Interceptor):
    """Goes before the interceptor that names failures, so that it sees their names."""

    def __init__(self, meters: Meters) -> None:
        self._recorder = Recorder(meters)

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _Measured(next, self._recorder)


def _shielded(record: Callable[..., None], *arguments: Any) -> None:
    """A metric that can't be recorded costs no activity its result."""
    try:
        record(*arguments)
    except Exception:
        log.exception("a metric could not be recorded")


async def sample(meters: Meters, sources: Sequence[Source], *, every_s: float = SAMPLE_EVERY_S) -> None:
    """Set the gauges of the sources, for ever."""
    while True:
        for source in sources:
            try:
                for name, value, labels in await source():
                    meters.set(name, value, **labels)
            except Exception as error:
                log.debug("a gauge could not be read: %s", error)
        await asyncio.sleep(every_s)


def sandboxes(backend: DockerBackend) -> Source:
    """How full this host is: sandboxes of attempts, those that wait to be asked for, and the places for the former."""

    async def look() -> list[Sample]:
        waiting = await asyncio.to_thread(backend.waiting)
        return [
            Sample("sandboxes", len(await backend.living()), {"state": "taken"}),
            Sample("sandboxes", sum(waiting.values()), {"state": "waiting"}),
            Sample("sandbox_slots", backend.slots, {}),
        ]

    return look


def engines(pool: EnginePool) -> Source:
    """How busy this worker sees each engine: its own requests, the most that it sends, and those that wait for room."""

    async def look() -> list[Sample]:
        doors = pool.doors
        return [
            *(Sample("engine/requests", door.in_flight, {"engine": door.name}) for door in doors),
            *(Sample("engine/limit", door.limit, {"engine": door.name}) for door in doors),
            Sample("engine/waiting_requests", pool.waiting, {}),
        ]

    return look
