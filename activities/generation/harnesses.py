"""The harness between a policy and its sandbox: what it is told, how its text is read, how it sees what came of it.

Owns the interface (`Harness`), the two harnesses that play turn by turn in the Episode workflow, and the names under
which a run asks for one. Promises: a harness keeps nothing between turns, so that any worker can play the next one.
docs/harnesses.md is for whoever writes another. Called by the generate activity and by `ratchet replay`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any, Protocol

from activities.generation.harness import initial_messages, observation_message, parse_action
from activities.generation.tool_calls import CallSyntax, MalformedCall, ToolCall, read_calls, split_thoughts
from activities.generation.transcript import Messages, Template, Tools
from tasksets.base import Task
from workflows.contracts import SHELL_HARNESS, TOOLS_HARNESS, Action, ActionKind
from workflows.errors import InvalidConfig

TOOLS_PROMPT = (
    "You work in a Linux shell. Call the tool bash to run one command, and look at its output before the next. When"
    " you are done, reply with the result and call nothing."
)
TOOLS_REMINDER = 'Call bash with {"command": "..."}, or reply with the result and no call.'
BASH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the shell; its output comes back.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    },
}
_ANSWER = re.compile(r"^[ \t]*Answer:(.*)$", re.MULTILINE)


class Harness(Protocol):
    """How one policy plays. Made anew for each turn, from the model's template: `factory(template)`."""

    @property
    def tools(self) -> Tools:
        """What the template is given as `tools=`; empty for a harness without any."""
        ...

    def begin(self, task: Task) -> Messages:
        """The conversation before the first generation."""
        ...

    def read(self, text: str) -> Action:
        """The one action that a sampled text asks for, special tokens left out. MALFORMED, with what to do in `error`,
        for a text that asks for none or several: it is the observation of the next turn, or the end."""
        ...

    def observe(self, text: str, observation: str) -> Messages:
        """The messages after the answer `text`: what came of its command, or the error of a malformed one. They may
        not hold the answer: its tokens stand as they were sampled."""
        ...


Factory = Callable[[Template], Harness]


class ShellHarness:
    """Commands in fenced blocks, and a line `Answer:`; activities/generation/harness.py has the syntax."""

    tools: Tools = ()

    def __init__(self, template: Template) -> None:
        pass

    def begin(self, task: Task) -> Messages:
        return initial_messages(task)

    def read(self, text: str) -> Action:
        return parse_action(text)

    def observe(self, text: str, observation: str) -> Messages:
        return [observation_message(observation)]


class ToolsHarness:
    """One tool, `bash`, in the model's own syntax; a text without a call is the answer."""

    tools: Tools = (BASH,)

    def __init__(self, template: Template) -> None:
        syntax = template.call_syntax
        if syntax is None:
            raise InvalidConfig(
                "rollout.harness tools: the model's chat template renders no tools, or has them called otherwise than"
                " Hermes' and Llama 3's do; take harness shell, or one of your own"
            )
        self._syntax: CallSyntax = syntax

    def begin(self, task: Task) -> Messages:
        return [{"role": "system", "content": TOOLS_PROMPT}, {"role": "user", "content": task.instruction}]

    def read(self, text: str) -> Action:
        _, words = split_thoughts(text)
        try:
            said, calls = read_calls(words, self._syntax)
        except MalformedCall as error:
            return _malformed(str(error))
        if len(calls) > 1:
            return _malformed("more than one call")
        return _command(calls[0]) if calls else _answer(said)

    def observe(self, text: str, observation: str) -> Messages:
        if self.read(text).kind is ActionKind.COMMAND:
            return [{"role": "tool", "name": "bash", "content": observation}]
        return [observation_message(observation)]


def open_harness(name: str, template: Template) -> Harness:
    """The harness of `rollout.harness`: shell, tools, or `module:factory` of one's own. Raises InvalidConfig."""
    return _factory(name)(template)


def _factory(name: str) -> Factory:
    if name == SHELL_HARNESS:
        return ShellHarness
    if name == TOOLS_HARNESS:
        return ToolsHarness
    module, _, attribute = name.partition(":")
    try:
        factory: Factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidConfig(f"rollout.harness {name}: {error}; its package must be installed beside Ratchet") from error
    return factory


def _command(call: ToolCall) -> Action:
    command = call.arguments.get("command")
    if call.name != "bash" or not isinstance(command, str):
        return _malformed(f"there is no tool {call.name!r} with these arguments")
    if not command.strip():
        return _malformed("the command is empty")
    if "\0" in command:
        return _malformed("the command holds a NUL byte")
    return Action(kind=ActionKind.COMMAND, command=command.strip("\n"))


def _answer(said: str) -> Action:
    """A line `Answer: ...` where there is one, the whole text elsewhere."""
    lines = _ANSWER.findall(said)
    answer = (lines[-1] if lines else said).strip()
    return Action(kind=ActionKind.FINAL, answer=answer) if answer else _malformed("neither a call nor a result")


def _malformed(why: str) -> Action:
    return Action(kind=ActionKind.MALFORMED, error=f"Not understood: {why}. {TOOLS_REMINDER}")
