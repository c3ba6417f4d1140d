"""Environment reliability: whether failures are the model's or ours, where ours come from, and which tasks flake."""

from __future__ import annotations

from sqlmodel import Session

from storage import health
from storage.report import words
from storage.report.limits import EnvironmentLimits, Limits
from storage.report.model import BucketPart, Report
from storage.report.parts import QuestionPart
from storage.report.readiness.answer import SHOWN_ROWS, Answer
from workflows.contracts import EpisodeKind, Outcome

NOWHERE = "not named"


def environment(opened: Session, report: Report, limits: Limits) -> QuestionPart:
    """The answer to the fourth question."""
    question = "Are failures the model's, and not ours?"
    answer, bounds = Answer("environment reliability", question, "environment", limits.environment), limits.environment
    lost = health.losses(opened, run=report.run)
    answer.at_most(
        "attempts that were lost", report.summary.infra_share, words.share, "infra_share", because=_places(lost)
    )
    _outage(answer, opened, report, bounds)
    _tasks(answer, opened, report, bounds)
    _hosts(answer, opened, report)
    _rewards(answer, report)
    total, whole = sum(item.attempts for item in lost), sum(item.reproducible for item in lost)
    answer.text("can be replayed", f"{whole} of {total} lost attempts, by ratchet replay" if total else "none lost")
    again = health.replays(opened, run=report.run)
    if again.attempts:
        answer.text("went on in a fresh sandbox", f"{again.attempts} attempts, {again.valid} of them to a valid end")
    answer.detail(
        "What was lost, by boundary and place",
        ("boundary", "where", "attempts", "for example", "mostly because"),
        [(item.boundary, item.place or NOWHERE, str(item.attempts), item.example, item.why) for item in lost],
    )
    attempts = sum(report.outcomes.get(EpisodeKind.TRAIN, {}).values())
    summary = (
        f"{words.share(report.summary.infra_share)} of {attempts} attempts were lost, none of them in the gradient"
    )
    return answer.part(summary, unmeasured="" if attempts else "no attempt has ended yet: look again later")


def _places(lost: list[health.Loss]) -> str:
    """Example: `sandbox at local (12), engine at local-e1 (3)`."""
    return ", ".join(f"{item.boundary} at {item.place or NOWHERE} ({item.attempts})" for item in lost[:4])


def _lost(bucket: BucketPart) -> int:
    return sum(bucket.outcomes.get(name, 0) for name in health.LOST)


def _outage(answer: Answer, opened: Session, report: Report, bounds: EnvironmentLimits) -> None:
    """The slice of time that lost the largest share."""

    def share(bucket: BucketPart) -> float:
        ended = sum(bucket.outcomes.values()) - bucket.outcomes.get(Outcome.SURPLUS, 0)
        return _lost(bucket) / ended if ended else 0.0

    buckets = report.outcomes_over_time
    worst = max((item for item in buckets if _lost(item) >= bounds.outage_losses), key=share, default=None)
    because = ""
    if worst is not None:
        since, until = report.started_at + worst.from_s, report.started_at + worst.to_s
        span = f"{words.axis_clock(worst.from_s)} to {words.axis_clock(worst.to_s)} after the start"
        places = _places(health.losses(opened, run=report.run, since=since, until=until))
        because = f"{_lost(worst)} attempts, {span}: {places}"
    value = (share(worst) if worst is not None else 0.0) if buckets else None
    answer.at_most("worst outage", value, words.share, "outage_share", because=because)


def _hosts(answer: Answer, opened: Session, report: Report) -> None:
    """Where the sandboxes lived, and which of those places is there no more."""
    hosts = health.hosts(opened, run=report.run)
    dead = [item for item in hosts if item.dead]
    because = "; ".join(map(_last, dead))
    if hosts:
        answer.at_most("dead hosts", float(len(dead)), words.count, "dead_hosts", because=because)
    answer.detail(
        "Sandbox hosts",
        ("host", "attempts", "lost", "share", "last ended well"),
        [
            (item.host, str(item.attempts), str(item.lost), words.share(item.lost / item.attempts), _well(item, report))
            for item in hosts
        ],
    )


def _last(host: health.HostHealth) -> str:
    """Example: `b lost its last 3 attempts, such as r/g7/e0/a0: host b: it takes up nothing any more`."""
    return f"{host.host} lost its last {len(host.lost_since)} attempts, such as {host.lost_since[-1]}: {host.why}"


def _well(host: health.HostHealth, report: Report) -> str:
    return f"{words.axis_clock(host.well_at - report.started_at)} after the start" if host.well_at else "never"


def _tasks(answer: Answer, opened: Session, report: Report, bounds: EnvironmentLimits) -> None:
    """Tasks that lose more than others, that score the same doings differently, and that the run gave up."""
    losing = health.task_losses(opened, run=report.run)
    often = [item for item in losing if item.lost >= bounds.task_losses]
    worst = often[0].lost / often[0].attempts if often else 0.0
    names = ", ".join(f"{item.task} ({item.lost} of {item.attempts})" for item in often[:3])
    known = bool(report.outcomes)
    answer.at_most("lost at one task", worst if known else None, words.share, "task_loss_share", because=names)
    flaky = health.flakes(opened, run=report.run)
    answer.at_most(
        "tasks that flake",
        float(len(flaky)) if known else None,
        words.count,
        "flaky_tasks",
        because="; ".join(f"{item.task}: {_pair(item)}" for item in flaky[:3]),
    )
    answer.at_most(
        "tasks in quarantine",
        float(len(report.quarantined)) if known else None,
        words.count,
        "quarantined_tasks",
        because="; ".join(f"{item.task}: {item.why}" for item in report.quarantined[:3]),
    )
    answer.detail(
        "Tasks that lose attempts",
        ("task", "lost", "attempts", "share"),
        [(i.task, str(i.lost), str(i.attempts), words.share(i.lost / i.attempts)) for i in losing[:SHOWN_ROWS]],
    )
    answer.detail(
        "Tasks that flake: same commands, outputs and answer, different rewards",
        ("task", "attempt", "reward", "attempt", "reward"),
        [
            (item.task, item.one, words.reward(item.reward), item.other, words.reward(item.other_reward))
            for item in flaky[:SHOWN_ROWS]
        ],
    )


def _rewards(answer: Answer, report: Report) -> None:
    """What was trained on rewards that an operator marked as wrong. What only looks wrong decides nothing."""
    rewards = report.rewards
    held = [mark for mark in rewards.marks if mark.undone_at is None]
    answer.at_most(
        "trained tokens in quarantine",
        rewards.affected.token_share,
        words.share,
        "quarantined_token_share",
        because="; ".join(f"{mark.kind} {mark.target}: {mark.why}" for mark in held[:3]),
    )
    tasks = len({item.task for item in rewards.findings})
    looks = f"{len(rewards.findings)} findings at {tasks} tasks: ratchet audit {report.run}"
    answer.text("rewards that look wrong", looks if rewards.findings else "none")


def _pair(item: health.Flake) -> str:
    """Example: `r/g0/e0/a0 scored 1, r/g4/e2/a0 did the same and scored 0`."""
    return f"{item.one} scored {item.reward:g}, {item.other} did the same and scored {item.other_reward:g}"
