"""Evaluation: what was measured on held-out tasks, and whether that is what will be served."""

from __future__ import annotations

from storage.report import words
from storage.report.evaluation_parts import MeasuredPart, change_words
from storage.report.limits import Limits
from storage.report.model import Report
from storage.report.parts import QuestionPart
from storage.report.readiness.answer import SHOWN_ROWS, Answer
from storage.report.readiness.by_step import worst
from workflows.contracts import EvaluationState

OVER = ("finished", "failed", "cancelled")


def evaluation(report: Report, limits: Limits) -> QuestionPart:
    """The answer to the sixth question: by the newest result of the newest version that has one."""
    answer = Answer("evaluation", "Does evaluation measure what will be served?", "evaluation", limits.evaluation)
    part = report.evaluation
    results = [item for item in part.measured if item.counts]
    judged = max(results, key=lambda item: (item.version, item.started_at), default=None)
    _figures(answer, report, results, judged)
    for sentence in part.apart:
        answer.fault(sentence)
    last = part.measured[-1] if part.measured else None
    if last is not None and last.state == EvaluationState.REFUSED:
        answer.fault(f"{last.id} was refused: {last.reason}; make another: {part.again}")
    if judged is not None and judged.stale:
        changed = change_words(judged.stale)
        answer.fault(f"the result of version {judged.version} is stale: {changed}; make another: {part.again}")
    _details(answer, part.measured, judged)
    return answer.part(_summary(judged), unmeasured=_missing(report, judged))


def _figures(answer: Answer, report: Report, results: list[MeasuredPart], judged: MeasuredPart | None) -> None:
    points = report.evaluation.versions
    shares = {f"version {item.version}": item.excluded / max(1, item.episodes + item.excluded) for item in points}
    shares |= {item.id: item.excluded / max(1, item.episodes + item.excluded) for item in results}
    answer.shown("evaluations", float(max(len(points), len(results))), words.count)
    answer.shown("held-out reward, first", report.evaluation.first, words.reward)
    answer.shown("held-out reward, last", report.evaluation.last, words.reward)
    newest = judged.version if judged else points[-1].version if points else None
    since = None if newest is None else float(report.policy_version - newest)
    if judged is not None and judged.reward is not None:
        answer.text("newest result", f"version {judged.version}: {words.interval(judged.reward)}")
        answer.text("its fingerprint", f"{judged.fingerprint}: {fingerprint_words(judged)}")
    answer.shown("versions since the last one", since, words.count)
    most = max(shares, key=lambda name: shares[name]) if shares else ""
    answer.at_most("episodes left out, worst", worst_share(shares), words.share, "excluded_share", because=most)


def worst_share(shares: dict[str, float]) -> float | None:
    return worst(dict(enumerate(shares.values())))


def _summary(judged: MeasuredPart | None) -> str:
    if judged is None or judged.reward is None:
        return ""
    return f"version {judged.version} has {words.interval(judged.reward)} held out, on what serves now"


def _missing(report: Report, judged: MeasuredPart | None) -> str:
    """What is not known, and the command by which it would be; empty where it is known."""
    again = report.evaluation.again
    if judged is None and not report.evaluation.versions:
        return f"there is no evaluation: set evaluation.tasks in run.json, or: {again}"
    if judged is None:
        return f"results are stored without the engine, dtype, kernels and sampling that made them: {again}"
    if report.state in OVER and judged.version < report.policy_version:
        return f"version {report.policy_version} will serve, the newest result is of {judged.version}: {again}"
    return ""


def fingerprint_words(item: MeasuredPart) -> str:
    """The fields that a person asks for first."""
    known = item.fields
    engine = f"{known.get('engine', '')} {known.get('engine_version', '')}".strip()
    first = [str(known[name]) for name in ("dtype", "attention_backend", "device") if known.get(name)]
    named = [f"{name} {known[name]}" for name in ("quantization", "kv_cache_dtype", "temperature") if name in known]
    return ", ".join([engine, *first, *named])


def _details(answer: Answer, measured: list[MeasuredPart], judged: MeasuredPart | None) -> None:
    stale = [item for item in measured if item.stale]
    answer.detail(
        "Stale results",
        ("evaluation", "version", "what changed since"),
        [(item.id, str(item.version), change_words(item.stale)) for item in stale[-SHOWN_ROWS:]],
    )
    answer.detail(
        "Evaluations without a result",
        ("evaluation", "state", "why"),
        [(item.id, item.state, item.reason or words.NONE) for item in measured if not item.counts][-SHOWN_ROWS:],
    )
    if judged is not None:
        answer.detail(
            f"What {judged.id} was made on",
            ("field", "value"),
            [(name, str(value)) for name, value in sorted(judged.fields.items())],
        )
