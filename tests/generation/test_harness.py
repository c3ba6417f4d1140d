"""The action syntax: one reading for every text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.generation.harness import (
    carried,
    format_observation,
    initial_messages,
    observation_message,
    parse_action,
    system_prompt,
)
from tasksets import open_taskset
from workflows.contracts import Action, ActionKind, ActOutput, FinishReason, GenerateOutput, Split
from workflows.converter import data_converter


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("```bash\nls -l\n```", "ls -l"),
        ("I look first.\n```sh\ncat a\n```\nThen I go on.", "cat a"),
        ("```bash\ncat <<E\nAnswer: no\nE\n```", "cat <<E\nAnswer: no\nE"),
        ("```bash\r\nls\r\n```", "ls"),
        ("```bash\necho '```x'\n```", "echo '```x'"),
        ('<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>', "ls"),
    ],
)
def test_one_block_or_one_tool_call_is_a_command(text: str, command: str) -> None:
    action = parse_action(text)
    assert (action.kind, action.command) == (ActionKind.COMMAND, command)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 17", "17"),
        ("It is clear now.\nAnswer:  two words \nBye.", "two words"),
        ("Answer: `x`", "x"),
        ("Answer: '", "'"),
    ],
)
def test_an_answer_line_without_a_block_ends_the_episode(text: str, answer: str) -> None:
    action = parse_action(text)
    assert (action.kind, action.answer) == (ActionKind.FINAL, answer)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no action"),
        ("the answer: 3", "no action"),
        ("```bash\nls", "not closed"),
        ("```bash\nls```", "not closed"),
        ("```bash\n\n```", "empty"),
        ("```\nls\n```", "```bash"),
        ("```python\nprint()\n```", "```bash"),
        ("```bash\nls\n```\n```bash\nls\n```", "more than one"),
        ("```bash\nls\n```\nAnswer: 3", "more than one"),
        ("Answer: 3\nAnswer: 4", "more than one"),
        ("Answer:  ", "empty"),
        ("```bash\nprintf '\0'\n```", "NUL"),
        ("<tool_call>{broken</tool_call>", "not JSON"),
        ("<tool_call>[1]</tool_call>", "must be"),
        ('<tool_call>{"name": "python", "arguments": {"command": "1"}}</tool_call>', "must be"),
        ('<tool_call>{"name": "bash", "arguments": {"command": 1}}</tool_call>', "must be"),
        ('<tool_call>{"name": "bash"', "not closed"),
        ('```bash\nls\n```<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>', "not closed"),
        ('```bash\nls\n```\n<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>', "more than one"),
    ],
)
def test_everything_else_is_malformed_and_says_why_and_what_to_do(text: str, why: str) -> None:
    action = parse_action(text)
    assert action.kind is ActionKind.MALFORMED
    assert why in action.error
    assert "Answer:" in action.error


@given(st.text() | st.lists(st.sampled_from(["```bash", "```", "ls", "Answer: 1", "<tool_call>", "{"])).map("\n".join))
def test_no_text_breaks_the_parser(text: str) -> None:
    action = parse_action(text)
    assert bool(action.command) == (action.kind is ActionKind.COMMAND)
    assert bool(action.answer) == (action.kind is ActionKind.FINAL)
    assert bool(action.error) == (action.kind is ActionKind.MALFORMED)


def test_the_conversation_begins_with_the_system_prompt_and_the_instruction() -> None:
    taskset = open_taskset("shell")
    task = taskset.load(taskset.ids(Split.TRAIN)[0])
    assert initial_messages(task) == [
        {"role": "system", "content": system_prompt()},
        {"role": "user", "content": task.instruction},
    ]
    assert observation_message("x") == {"role": "user", "content": "x"}


def test_an_observation_tells_how_a_command_ended_unless_it_went_well() -> None:
    assert format_observation(ActOutput(exit_code=0, output="a\n")) == "a"
    assert format_observation(ActOutput(exit_code=0)) == "(no output)"
    assert format_observation(ActOutput(exit_code=2, output="a: not found\n")) == "a: not found\n(exit 2)"
    assert format_observation(ActOutput(exit_code=None, signal=9)) == "(ended by signal 9)"
    assert format_observation(ActOutput(exit_code=None, timed_out=True, command_s=10.0)) == "(timed out after 10 s)"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
        ("<tool_call>" * 100_000, "not closed"),
        ("```" + " " * 200_000 + "x y", "no action"),
    ],
)
def test_no_text_takes_long_or_breaks_the_parser(text: str, why: str) -> None:
    """An error of ours would be a way out of a failure."""
    assert why in parse_action(text).error


@pytest.mark.parametrize("letter", ["x", "\x01", "\u20ac", "\U0001f600"])
def test_whatever_a_harness_reads_fits_a_message_or_is_refused_with_a_reason(letter: str) -> None:
    for length in (1000, 5000, 10_000, 40_000, 1 << 20):
        said = letter * length
        for kind, action in (
            (ActionKind.COMMAND, Action(kind=ActionKind.COMMAND, command=said)),
            (ActionKind.FINAL, Action(kind=ActionKind.FINAL, answer=said)),
            (ActionKind.MALFORMED, Action(kind=ActionKind.MALFORMED, error=said)),
        ):
            out = carried(action)
            assert out == action or out.kind is ActionKind.MALFORMED
            assert out == action or kind is ActionKind.MALFORMED or "more than 40 KiB" in out.error
            text = letter * 2000
            sent = GenerateOutput(segment="s", action=out, text=text, finish_reason=FinishReason.STOP)
            data_converter.payload_converter.to_payloads([sent])


def test_halves_of_characters_are_in_no_action() -> None:
    """Messages can't hold them."""
    call = '<tool_call>{"name": "bash", "arguments": {"command": "echo \\udce9"}}</tool_call>'
    assert parse_action(call).command == "echo \ufffd"
    own = Action(kind=ActionKind.COMMAND, command="echo \udce9")
    assert carried(own).command == "echo \ufffd"
