"""Weight publication: what an update of the engines costs, and whether each proved what it serves."""

from __future__ import annotations

from statistics import fmean

from sqlmodel import Session

from storage import health
from storage.report import words
from storage.report.limits import Limits
from storage.report.model import Report
from storage.report.parts import QuestionPart
from storage.report.readiness.answer import SHOWN_ROWS, Answer
from storage.report.weight_parts import PublicationPart


def publication(opened: Session, report: Report, limits: Limits) -> QuestionPart:
    """The answer to the fifth question."""
    question = "What does a weight update cost, and do engines serve what they say?"
    answer = Answer("weight publication", question, "publication", limits.publication)
    means, engines = report.summary, health.engines(opened, run=report.run)
    loads = [(item.version, load) for item in report.publications for load in item.loads]
    unproven = [(version, load) for version, load in loads if not load.proven]
    behind = max(engines, key=lambda engine: engine.behind, default=None)
    cached = max((load.cached_tokens_after for _, load in loads if load.proven), default=None)
    answer.at_most("publish latency, mean", means.publish_latency_s, words.seconds, "publish_s", because=_part(report))
    answer.at_most("pause of an engine, mean", means.pause_s, words.seconds, "pause_s")
    answer.at_most(
        "unproven loads",
        float(len(unproven)) if loads else None,
        words.count,
        "unproven_loads",
        because="; ".join(f"{load.engine} at version {version}: {load.why}" for version, load in unproven[:3]),
    )
    answer.at_most(
        "versions that the last engine is behind",
        None if behind is None else float(behind.behind),
        words.count,
        "versions_behind",
        because="" if behind is None else f"{behind.engine} has proven {_newest(behind.newest)}",
    )
    answer.at_most(
        "tokens from an old cache after a load", None if cached is None else float(cached), words.count, "cached_tokens"
    )
    troubles, age = report.weight_troubles, report.policy_age
    answer.shown("updates that went wrong at first", float(len(troubles)) if loads else None, words.count)
    answer.shown("versions behind at a request, mean", age.mean, words.small)
    answer.detail(
        "Updates that went wrong at first",
        ("version", "where", "what went wrong", "how it ended"),
        [(str(item.version), item.engine or "publication", item.what, item.ending) for item in troubles[-SHOWN_ROWS:]],
    )
    total = sum(age.requests.values())
    in_flight = float(sum(item.tokens for item in report.spanning)) if loads else None
    answer.shown("tokens of requests that spanned a load", in_flight, words.count)
    answer.detail(
        "Requests in flight while an engine took up a version",
        ("version", "requests", "tokens"),
        [
            (str(item.version), words.thousands(item.requests), words.thousands(item.tokens))
            for item in report.spanning[-SHOWN_ROWS:]
        ],
    )
    answer.detail(
        "Age of an engine's weights when it was asked",
        ("versions behind", "requests", "share"),
        [(str(behind), words.thousands(count), words.share(count / total)) for behind, count in age.requests.items()],
    )
    answer.detail(
        "Publishing by part, means",
        ("part", "seconds"),
        [(name, words.seconds(value)) for name, value in _publishing(report.publications).items()],
    )
    answer.detail(
        "Engines",
        ("engine", "loads", "unproven", "pause, mean", "newest proven", "behind"),
        [
            (
                item.engine,
                str(item.loads),
                str(item.unproven),
                words.seconds(item.pause_s),
                words.count(item.newest),
                str(item.behind),
            )
            for item in engines
        ],
    )
    missing = "no engine has loaded a version yet: look again after the first update"
    summary = f"publishing takes {words.seconds(means.publish_latency_s)}, an engine pauses"
    return answer.part(f"{summary} {words.seconds(means.pause_s)}", unmeasured="" if loads else missing)


def _newest(version: int | None) -> str:
    return "nothing" if version is None else f"version {version}"


def _publishing(items: list[PublicationPart]) -> dict[str, float]:
    names = dict.fromkeys(name for item in items for name in item.seconds if name != "total")
    return {name: fmean(item.seconds.get(name, 0.0) for item in items) for name in names}


def _part(report: Report) -> str:
    parts = _publishing(report.publications)
    return f"most of it is {max(parts, key=lambda name: parts[name])}" if parts else ""
