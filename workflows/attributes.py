"""Search attributes of the Temporal UI and the words of its summaries."""

from __future__ import annotations

from temporalio.common import SearchAttributeKey, SearchAttributePair, TypedSearchAttributes

RUN = SearchAttributeKey.for_keyword("RatchetRun")
TASK = SearchAttributeKey.for_keyword("TaskId")
OUTCOME = SearchAttributeKey.for_keyword("Outcome")
STOP_REASON = SearchAttributeKey.for_keyword("StopReason")
POLICY_VERSION = SearchAttributeKey.for_int("PolicyVersion")
REWARD = SearchAttributeKey.for_float("Reward")


def started(run: str, task_id: str | None = None) -> TypedSearchAttributes:
    """Attributes that a child has from its start."""
    pairs: list[SearchAttributePair[str]] = [SearchAttributePair(RUN, run)]
    if task_id is not None:
        pairs.append(SearchAttributePair(TASK, task_id))
    return TypedSearchAttributes(pairs)


def shorten(text: str, limit: int = 80) -> str:
    """One line of at most `limit` bytes of UTF-8, without what can't be printed."""
    line = "".join(char if char.isprintable() else "\ufffd" for char in " ".join(text.split()))
    data = line.encode("utf-8", "replace")
    return line if len(data) <= limit else data[: limit - 3].decode("utf-8", "ignore") + "…"
