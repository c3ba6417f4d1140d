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


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        ("hermes", f"<tool_call>{DEEP}</tool_call>"),
        ("hermes", '<tool_call>{"name": "bash", "arguments": {"command": ' + DEEP + "</tool_call>"),
        ("llama3", '{"name": "bash", "parameters": {"command": ' + DEEP),
    ],
)
def test_a_call_that_is_nested_deeper_than_python_reads_is_broken(syntax: str, text: str) -> None:
    with pytest.raises(MalformedCall, match="not JSON"):
        read_calls(text, CallSyntax(syntax))


def test_a_tag_that_is_repeated_without_end_is_read_in_one_pass() -> None:
    with pytest.raises(MalformedCall, match="not closed"):
        read_calls("<tool_call>" * 100_000, CallSyntax.HERMES)
    _, (call,) = read_calls('<tool_call>{"name": "a", "arguments": {}}</tool_call>', CallSyntax.HERMES)
    assert call == ToolCall("a", {})


@pytest.mark.parametrize("syntax", CallSyntax)
def test_halves_of_characters_are_replaced_and_whole_ones_kept(syntax: CallSyntax) -> None:
    names = {"hermes": "arguments", "llama3": "parameters"}
    command = r"echo \ud83d \ud83d\ude00"
    body = f'{{"name": "bash", "{names[syntax]}": {{"command": "{command}"}}}}'
    text = f"<tool_call>{body}</tool_call>" if syntax is CallSyntax.HERMES else body
    assert read_calls(text, syntax)[1] == [ToolCall("bash", {"command": "echo \ufffd \U0001f600"})]
