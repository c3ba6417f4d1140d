"""A command's output as the agent sees it: bytes to text, cut to a budget of characters with a mark that says so.

Pure. Called by `SandboxActivities.act`.
"""

from __future__ import annotations

import json

from activities.sandbox.channel import Result

MOST_BYTES = 48 * 1024
"""What an output may take in a message, whatever characters it is made of; a message may have 64 KiB."""


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
        if len(text) <= max_chars and _encoded(text) <= MOST_BYTES:
            return text
        start = end = text
    else:
        start, end = readable(result.head), readable(result.tail)
    mark = f"\n[... cut: {result.total_bytes} bytes in all ...]\n"
    room = max(max_chars - len(mark), 0)
    while True:
        tail = room // 2
        text = start[: room - tail] + mark + (end[-tail:] if tail else "")
        if _encoded(text) <= MOST_BYTES:
            return text
        room = room * 3 // 4


def _encoded(text: str) -> int:
    """Bytes of the text in a message: a control character takes six."""
    return len(json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass"))
