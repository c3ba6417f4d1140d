"""What a report says of weight updates beyond their figures: those that went wrong, by name, and how old the weights
were at each request. Called by `build_report`."""

from __future__ import annotations

from collections import Counter

from sqlmodel import Session

from storage.policy_age import PolicyAge
from storage.report import words
from storage.report.weight_parts import PolicyAgePart, TryPart, WeightTroublePart
from storage.tables import WeightTry
from storage.weight_tries import GOOD, RESTARTED, Trouble, troubles, wrong


def weight_troubles(opened: Session, run: str, *, over: bool) -> list[WeightTroublePart]:
    """Versions that were not published, or not proven by an engine, at the first try. `over`: so is the run."""
    return [_trouble(item, over) for item in troubles(opened, run=run)]


def policy_age_part(age: PolicyAge) -> PolicyAgePart:
    return PolicyAgePart(requests=age.requests, mean=age.mean, most=age.most)


def _trouble(trouble: Trouble, over: bool) -> WeightTroublePart:
    good = any(row.ended in GOOD for row in trouble.tries)
    return WeightTroublePart(
        version=trouble.version,
        engine=trouble.engine,
        tries=[_try(row) for row in trouble.tries],
        what=_what(trouble.tries),
        ending=_ending(trouble, over),
        settled=good or trouble.overtaken_by is not None,
    )


def _try(row: WeightTry) -> TryPart:
    seconds = None if row.ended_at is None else max(0.0, row.ended_at - row.began_at)
    return TryPart(part=row.part, began_at=row.began_at, seconds=seconds, ended=row.ended, why=row.why)


def _what(tries: list[WeightTry]) -> str:
    """Each failure once, in the order in which they came, with the part that it was in."""
    faults = Counter(f"{row.part}: {row.why}" for row in tries if wrong(row))
    return "; ".join(fault + (f" ({count} times)" if count > 1 else "") for fault, count in faults.items())


def _ending(trouble: Trouble, over: bool) -> str:
    begun = [row for row in trouble.tries if row.ended != RESTARTED]
    anew = len(trouble.tries) - len(begun)
    before = f"the engine was started anew{f' {anew} times' if anew > 1 else ''}; " if anew else ""
    for number, row in enumerate(begun, start=1):
        if row.ended in GOOD:
            took = words.seconds((row.ended_at or row.began_at) - trouble.tries[0].began_at)
            return f"{before}{row.ended} with try {number}, {took} after the first began"
    if trouble.overtaken_by is not None:
        return f"{before}overtaken by version {trouble.overtaken_by}"
    if begun and not begun[-1].ended:
        return before + ("nobody saw its end" if over else f"try {len(begun)} is under way: {begun[-1].part}")
    missing = "served by this engine" if trouble.engine else "published"
    return f"{before}never {missing}" if over else f"{before}not {missing} yet"
