"""Text that a model, a task or a machine wrote, made harmless for people to look at.

A terminal obeys escape sequences (titles, links, the clipboard, colours, the cursor), and both terminal and page obey
characters that turn the direction of writing. What is left is what the text says. Called wherever a report shows text
that is not our own; the page escapes HTML besides, the terminal reads no markup.
"""

from __future__ import annotations

import re

REPLACEMENT = "\ufffd"

_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, the cursor
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]{0,4096}(?:\x07|\x1b\\|\x9c)"  # links, titles, strings
    r"|\x1b[ -/]*[0-~]"  # the other escapes
)
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"  # all but tab and line feed
    r"|[\u061c\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]"  # direction, no width
    r"|[\ud800-\udfff\ufffe\uffff]|[\U000e0000-\U000e007f]"  # not characters; tags that nobody sees
)


def printable(text: str) -> str:
    """The text without escape sequences; every other control character, tab and line feed aside, and every half of a
    surrogate pair is U+FFFD. CR LF is a line feed."""
    return _CONTROLS.sub(REPLACEMENT, _SEQUENCES.sub("", text.replace("\r\n", "\n")))


def one_line(text: str) -> str:
    """`printable`, on one line."""
    return " ".join(printable(text).split())
