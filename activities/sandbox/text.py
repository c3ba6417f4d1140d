"""A command's output as the agent sees it: bytes to text, cut to a budget of characters with a mark that says so.

Pure. Called by `SandboxActivities.act`.
"""

from __future__ import annotations

from activities.sandbox.channel import Result


def cap_bytes(max_chars: int) -> int:
    """Bytes to keep so that `max_chars` characters of four bytes are there: half from the start, half from the end."""
    return min(4 * max_chars + 8, 1 << 20)


def readable(data: bytes) -> str:
    """UTF-8 with what is invalid, and NUL, replaced by U+FFFD: databases and tokenizers take neither."""
    return data.decode("utf-8", "replace").replace("\0", "\ufffd")


def render(result: Result, max_chars: int) -> str:
    """The whole output where it fits `max_chars`; else its start and its end, and between them how much is left out."""
    whole = result.total_bytes == len(result.head) + len(result.tail)
    if whole:
        text = readable(result.head + result.tail)
        if len(text) <= max_chars:
            return text
        start = end = text
    else:
        start, end = readable(result.head), readable(result.tail)
    mark = f"\n[... cut: {result.total_bytes} bytes in all ...]\n"
    room = max(max_chars - len(mark), 0)
    tail = room // 2
    return start[: room - tail] + mark + (end[-tail:] if tail else "")
