from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.printable import one_line, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x9b31mred", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\", "click"),
        ("\x1b]52;c;cm0gLXJmIH4=\x07copied", "copied"),
        ("\x1bP1$r0m\x1b\\dcs", "dcs"),
        ("\x1bcreset", "reset"),
        ("\x1b(Bset", "set"),
        ("\x1b]0;never ended\nseen", "0;never ended\nseen"),
        ("half \x1b", "half \ufffd"),
        ("back\x08space\rreturn\x00nul\x7f", "back\ufffdspace\ufffdreturn\ufffdnul\ufffd"),
        ("a\r\nb\tc", "a\nb\tc"),
        ("user\u202eresu", "user\ufffdresu"),
        ("lone \ud800", "lone \ufffd"),
        ("[bold]not markup[/bold] <b>", "[bold]not markup[/bold] <b>"),
        ("naïve 日本 🙂 \ufffd", "naïve 日本 🙂 \ufffd"),
    ],
)
def test_what_a_terminal_would_obey_is_gone_and_the_words_stay(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters(codec=None, categories=None), max_size=60))
def test_nothing_that_a_terminal_obeys_is_left_of_any_text(text: str) -> None:
    shown = printable(text)
    assert not any((ord(char) < 32 and char not in "\n\t") or 127 <= ord(char) < 160 for char in shown)
    shown.encode("utf-8")


def test_one_line_has_no_line_break() -> None:
    assert one_line(" a\x1b[1m\n\n b\t") == "a b"
