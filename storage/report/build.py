"""Builds a report from the rows of a run."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from statistics import fmean, median

from sqlmodel import Session, col, select

from storage import evaluations, groups, queries, series
from storage.finish_order import COMPARED, MEASURES, PREFIX
from storage.policy_age import policy_age, spanning
from storage.report.evaluation_parts import apart, measured
from storage.report.incidents import incidents
from storage.report.limits import CostLimits, Limits, default_limits
from storage.report.model import (
    TIME_PARTS,
    BatchPart,
    BucketPart,
    EvaluationPart,
    EvaluationPoint,
    FailurePart,
    FatePart,
    FinishOrderPart,
    GpuHoursPart,
    GroupsPart,
    KindPart,
    MemberPart,
    QuarantinePart,
    Report,
    StepPart,
    Summary,
    SurplusPart,
    TailPart,
    VersionPart,
    VoidPart,
)
from storage.report.readiness import readiness
from storage.report.rewards import rewards_part
from storage.report.taskset import taskset_health
from storage.report.weight_parts import LoadPart, PublicationPart, SpanningPart
from storage.report.weights import policy_age_part, weight_troubles
from storage.tables import Batch, BatchMember, EngineLoad, Episode, PolicyVersion, Publication, Replay, Run
from storage.waiting import gpu_hours_waiting
from workflows.config import RunConfig
from workflows.contracts import EpisodeKind, Outcome

LAST_BATCHES = 3


def build_report(opened: Session, run: str, limits: Limits | None = None) -> Report:
    """The report of a run as it stands, its verdicts by the limits (the defaults where none are given). Raises
    NotFound naming the runs that exist."""
    row = queries.run_row(opened, run=run)
    config = RunConfig.model_validate(row.config)
    batches = series.batches(opened, run=run)
    sizes = series.batch_sizes(opened, run=run)
    age = policy_age(opened, run=run)
    steps = [_step(batch, sizes.get(batch.id), age.metrics(batch.step)) for batch in batches]
    publications = [_publication(item, loads) for item, loads in series.publications(opened, run=run)]
    outcomes = series.outcomes(opened, run=run)
    report = Report(
        run=row.id,
        state=row.state,
        reason=row.reason,
        mode=row.mode,
        model=config.model,
        taskset=config.taskset,
        seed=row.seed,
        resume_from=row.resume_from,
        started_at=row.started_at,
        ended_at=row.ended_at,
        seconds=max(0.0, (row.ended_at or time.time()) - row.started_at),
        step=row.step,
        steps_planned=config.training.steps,
        policy_version=row.policy_version,
        max_mismatch_kl=config.training.max_mismatch_kl,
        max_off_policy_steps=config.rollout.max_off_policy_steps if config.mode == "async" else 0,
        readiness=[],
        summary=_summary(opened, row, steps, publications, outcomes.get(EpisodeKind.TRAIN, {})),
        evaluation=_evaluation(opened, run),
        steps=steps,
        versions=[VersionPart(**item._asdict()) for item in series.reward_by_version(opened, run=run)],
        outcomes=outcomes,
        stop_reasons=series.stop_reasons(opened, run=run),
        gpu_hours=_gpu_hours(steps, (limits or default_limits()).cost),
        failures=[FailurePart(**item._asdict()) for item in series.failures(opened, run=run)],
        outcomes_over_time=[
            BucketPart(**item._asdict())
            for item in series.outcomes_over_time(opened, run=run, started_at=row.started_at)
        ],
        kinds=[KindPart(**item._asdict()) for item in series.episodes_by_kind(opened, run=run)],
        groups=_groups(opened, run),
        finish_order=_finish_order(config.rollout.pool_policy, steps),
        quarantined=[
            QuarantinePart(task=item.task, why=item.why, since=item.since)
            for item in groups.quarantined(opened, run=run)
        ],
        rewards=rewards_part(opened, run, limits or default_limits()),
        taskset_health=taskset_health(opened, row=row, rules=config.sampling),
        void_batches=[_void(batch, sizes.get(batch.id)) for batch in series.void_batches(opened, run=run)],
        publications=publications,
        weight_troubles=weight_troubles(opened, run, over=row.ended_at is not None),
        policy_age=policy_age_part(age),
        spanning=[SpanningPart(**item._asdict()) for item in spanning(opened, run=run)],
        incidents=[],
        last_batches=[_batch(opened, batch) for batch in batches[-LAST_BATCHES:]],
    )
    answers = readiness(opened, report, config, limits or default_limits())
    return report.model_copy(update={"readiness": answers, "incidents": incidents(opened, report)})


def _step(batch: Batch, size: series.BatchSize | None, more: dict[str, float]) -> StepPart:
    return StepPart(
        step=batch.step,
        state=batch.state,
        policy_version=batch.policy_version,
        episodes=size.episodes if size else 0,
        groups=size.groups if size else 0,
        reward=size.mean_reward if size else 0.0,
        time={name: float(value) for name, value in batch.waited.items()},
        tail=TailPart(seconds=batch.waited["tail"], **batch.tail) if batch.tail.get("attempt") else None,
        metrics={
            name: _finite(value) for name, value in sorted((batch.metrics | more).items()) if _measured(name, batch)
        },
    )


def _void(batch: Batch, size: series.BatchSize | None) -> VoidPart:
    return VoidPart(
        batch_id=batch.id,
        step=batch.step,
        reason=batch.reason,
        episodes=size.episodes if size else 0,
        groups=size.groups if size else 0,
    )


def _measured(name: str, batch: Batch) -> bool:
    """Without a token of the trainer's own weights there is no mismatch to measure, and 0 would be a lie."""
    return not name.startswith("mismatch_") or batch.metrics.get("mismatch_kl/tokens") != 0


def _finite(value: float | None) -> float | None:
    """JSON has no infinity and no NaN."""
    return float(value) if value is not None and math.isfinite(value) else None


def _publication(row: Publication, loads: list[EngineLoad]) -> PublicationPart:
    return PublicationPart(
        version=row.version,
        manifest=row.manifest,
        digest=row.digest,
        bytes=row.bytes,
        publish_latency_s=series.publish_latency(row, loads),
        seconds=row.seconds | _in_engine(row, series.slowest_load(loads)),
        published_at=row.published_at,
        loads=[
            LoadPart(
                engine=load.engine,
                proven=load.proven,
                why=load.why,
                pause_s=load.pause_s,
                seconds=load.seconds,
                cached_tokens_after=load.cached_tokens_after,
                canary_max_abs=load.canary_max_abs,
                checked=load.checked,
            )
            for load in loads
        ],
    )


def _in_engine(row: Publication, parts: dict[str, float]) -> dict[str, float]:
    """The engine's parts beside those of the publication, of which one has the same name."""
    return {f"engine: {name}" if name in row.seconds else name: value for name, value in parts.items()}


def _summary(
    opened: Session, row: Run, steps: list[StepPart], publications: list[PublicationPart], endings: dict[str, int]
) -> Summary:
    waits, tails = ([step.time[name] for step in steps if name in step.time] for name in ("to_trainable_batch", "tail"))
    parts = {name: _mean(step.time.get(name) for step in steps) for name in TIME_PARTS}
    attempts = sum(endings.values()) - endings.get(Outcome.SURPLUS, 0)
    tokens = series.tokens(opened, run=row.id)
    ours = endings.get(Outcome.INFRA_FAILURE, 0) + endings.get(Outcome.UNKNOWN, 0)

    def mean_of(name: str) -> float | None:
        return _mean(step.metrics.get(name) for step in steps)

    def max_of(name: str) -> float | None:
        return max((value for step in steps if (value := step.metrics.get(name)) is not None), default=None)

    return Summary(
        time_to_trainable_batch_s=median(waits[1:] or waits) if waits else None,
        tail_s=median(tails[1:] or tails) if tails else None,
        time_parts_s={name: value for name, value in parts.items() if value is not None},
        off_policy_steps=mean_of("off_policy/steps"),
        off_policy_steps_max=max_of("off_policy/steps_max"),
        mismatch_kl=mean_of("mismatch_kl/mean"),
        mismatch_kl_max=max_of("mismatch_kl/max"),
        divergence=mean_of("off_policy/divergence"),
        publish_latency_s=_mean(item.publish_latency_s for item in publications),
        pause_s=_mean(load.pause_s for item in publications for load in item.loads if load.proven),
        infra_share=ours / attempts if attempts else None,
        short_share=mean_of("groups/short_share"),
        sampled_tokens=tokens.sampled,
        cache_hit_share=tokens.cached / tokens.prompt if tokens.prompt else None,
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _gpu_hours(steps: list[StepPart], cost: CostLimits) -> GpuHoursPart:
    by_cause = gpu_hours_waiting([step.time for step in steps], gpus=cost.gpus)
    total = sum(by_cause.values()) if steps else None
    return GpuHoursPart(
        gpus=cost.gpus,
        waiting_on_env=total,
        by_cause=by_cause,
        price=cost.gpu_hour_price,
        cost=total * cost.gpu_hour_price if total is not None and cost.gpu_hour_price else None,
    )


def _evaluation(opened: Session, run: str) -> EvaluationPart:
    rows = series.evaluations(opened, run=run)
    points = [
        EvaluationPoint(
            version=row.version,
            mean_reward=row.mean_reward,
            episodes=row.episodes,
            excluded=row.excluded,
            by_kind=row.by_kind,
        )
        for row in rows
    ]
    return EvaluationPart(
        first=points[0].mean_reward if points else None,
        last=points[-1].mean_reward if len(points) > 1 else None,
        versions=points,
        measured=measured(opened, run=run),
        apart=apart(evaluations.serving(opened, run=run)),
        again=evaluations.another(opened, run=run),
    )


def _groups(opened: Session, run: str) -> GroupsPart:
    counts = groups.groups(opened, run=run)
    return GroupsPart(
        closed=counts["closed"],
        eligible=counts["eligible"],
        short=counts["short"],
        trained=counts["trained"],
        replaced_attempts=counts["replaced"],
        dropped=groups.groups_dropped(opened, run=run),
        fates=[FatePart(**item._asdict()) for item in groups.fates(opened, run=run)],
        surplus=SurplusPart(**groups.surplus(opened, run=run)._asdict()),
    )


def _finish_order(policy: str, steps: list[StepPart]) -> FinishOrderPart:
    def mean_of(name: str) -> float | None:
        return _mean(step.metrics.get(f"{PREFIX}{name}") for step in steps)

    means = {f"{name}_{of}": mean_of(f"{name}_{of}") for name in MEASURES for of in COMPARED}
    still_open = sum(int(step.metrics.get(f"{PREFIX}open") or 0) for step in steps)
    return FinishOrderPart(policy=policy, open=still_open, **means)


def _batch(opened: Session, batch: Batch) -> BatchPart:
    made = opened.exec(select(PolicyVersion.version).where(PolicyVersion.batch == batch.id)).first()
    rows = opened.exec(
        select(BatchMember, Episode)
        .join(Episode, col(BatchMember.episode) == Episode.id)
        .where(BatchMember.batch == batch.id)
        .order_by(col(BatchMember.position))
    ).all()
    used = select(Replay, Episode).join(Episode, col(Replay.episode) == Episode.id).where(Replay.batch == batch.id)
    trained: list[tuple[BatchMember | Replay, Episode]] = [(member, episode) for member, episode in rows]
    trained += [(use, episode) for use, episode in opened.exec(used.order_by(Replay.group_id)).all()]
    members = [
        MemberPart(
            attempt_id=episode.id,
            group_id=member.group_id,
            task=episode.task,
            reward=episode.reward,
            advantage=member.advantage,
            min_version=episode.min_version,
            max_version=episode.max_version,
            stop_reason=episode.stop_reason,
            sampled_tokens=episode.sampled_tokens,
        )
        for member, episode in trained
    ]
    return BatchPart(
        batch_id=batch.id,
        step=batch.step,
        state=batch.state,
        checkpoint=batch.checkpoint,
        version=made,
        members=members,
    )
