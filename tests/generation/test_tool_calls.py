"""Thoughts and calls in sampled text: one reading for every text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.generation.tool_calls import CallSyntax, MalformedCall, ToolCall, read_calls, split_thoughts

LS = ToolCall("bash", {"command": "ls"})


@pytest.mark.parametrize(
    ("text", "thoughts", "words"),
    [
        ("<think>\nhm\n</think>\n\nls", "hm", "ls"),
        ("hm\n</think>\n\nls", "hm", "ls"),
        ("<think>\n\n</think>\n\nls", "", "ls"),
        ("ls", "", "ls"),
        ("<think>it never ends", "it never ends", ""),
        ("\nls -l ", "", "\nls -l "),
    ],
)
def test_thoughts_are_apart_from_words(text: str, thoughts: str, words: str) -> None:
    assert split_thoughts(text) == (thoughts, words)


@pytest.mark.parametrize(
    ("syntax", "text", "beside", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>', "", [LS]),
        ("hermes", 'I look.\n<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>', "I look.", [LS]),
        ("hermes", '{"name": "bash", "parameters": {}}', '{"name": "bash", "parameters": {}}', []),
        ("hermes", "It is 3. ", "It is 3.", []),
        ("llama3", '{"name": "bash", "parameters": {"command": "ls"}}', "", [LS]),
        ("llama3", ' {"name": "bash", "parameters": {"command": "ls"}}\n', "", [LS]),
        ("llama3", '<|python_tag|>{"name": "bash", "parameters": {"command": "ls"}}', "", [LS]),
        ("llama3", '{"name": "bash", "arguments": {"command": "ls"}}', "", [LS]),
        (
            "llama3",
            '{"name": "bash", "parameters": {"command": "ls"}}; {"name": "b", "parameters": {}}',
            "",
            [LS, ToolCall("b", {})],
        ),
        ("llama3", '{"cats": 3}', '{"cats": 3}', []),
        ("llama3", "It is 3.", "It is 3.", []),
    ],
)
def test_calls_of_both_families_are_read(syntax: CallSyntax, text: str, beside: str, calls: list[ToolCall]) -> None:
    assert read_calls(text, CallSyntax(syntax)) == (beside, calls)


@pytest.mark.parametrize(
    ("syntax", "text", "why"),
    [
        ("hermes", '<tool_call>{"name": "bash"', "not closed"),
        ("hermes", "</tool_call>", "not closed"),
        ("hermes", "<tool_call>ls</tool_call>", "not JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", "must be"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "must be"),
        ("hermes", '<tool_call>{"name": "bash", "arguments": "ls"}</tool_call>', "must be"),
        ("llama3", '{"name": "bash", "parameters": {"command": "ls"}', "not JSON"),
        ("llama3", '{"name": "bash"}', "must be"),
        ("llama3", '{"name": "bash", "parameters": {}} and so on', "not JSON"),
    ],
)
def test_a_broken_call_says_what_is_wrong_with_it(syntax: CallSyntax, text: str, why: str) -> None:
    with pytest.raises(MalformedCall, match=why):
        read_calls(text, CallSyntax(syntax))


PIECES = ["<tool_call>", "</tool_call>", '{"name": "a", "arguments": {}}', "{", "<think>", "</think>", ";", '"name"']


@given(st.text() | st.lists(st.sampled_from(PIECES)).map("".join), st.sampled_from(CallSyntax))
def test_no_text_breaks_the_readers(text: str, syntax: CallSyntax) -> None:
    _, words = split_thoughts(text)
    try:
        beside, calls = read_calls(words, syntax)
    except MalformedCall as error:
        assert str(error)
    else:
        assert calls or beside == words.strip()
