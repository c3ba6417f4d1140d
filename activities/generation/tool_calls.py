"""What a sampled text says: its thoughts apart from its words, and the tool calls in them.

Owns the two ways in which open models write calls. Promises: every text has one reading; a text that sets out to call
and does not manage to is a MalformedCall that says why. Pure; called by the tool-calling harness and by the agents'
endpoint.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_THOUGHT = ("<think>", "</think>")


class CallSyntax(StrEnum):
    """How a family of templates has the model write a call."""

    HERMES = "hermes"
    """Between tags, as Hermes 2 Pro, Qwen 2.5 and Qwen 3:
    `<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>`."""
    LLAMA3 = "llama3"
    """The whole text, as Llama 3.1 to 3.3: `{"name": "bash", "parameters": {"command": "ls"}}`; several are divided by
    `;`."""


class MalformedCall(ValueError):
    """The text sets out to call a tool and does not manage to; the message says why, for the model."""


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


def split_thoughts(text: str) -> tuple[str, str]:
    """(thoughts, words) of a sampled text. The opening tag may be the generation prompt's; thoughts that do not end
    leave no words, as far as their beginning is in the text."""
    opening, closing = _THOUGHT
    if closing in text:
        thoughts, _, words = text.rpartition(closing)
        return thoughts.rpartition(opening)[2].strip("\n"), words.lstrip("\n")
    if text.lstrip().startswith(opening):
        return text.lstrip().removeprefix(opening).strip("\n"), ""
    return "", text


def read_calls(words: str, syntax: CallSyntax) -> tuple[str, list[ToolCall]]:
    """(what is said beside the calls, the calls in their order). Raises MalformedCall."""
    return _hermes(words) if syntax is CallSyntax.HERMES else _llama3(words)


def _hermes(words: str) -> tuple[str, list[ToolCall]]:
    beside = _HERMES.sub("", words)
    if "<tool_call>" in beside or "</tool_call>" in beside:
        raise MalformedCall("the <tool_call> is not closed")
    return beside.strip(), [_call(_json(body), ("arguments", "parameters")) for body in _HERMES.findall(words)]


def _llama3(words: str) -> tuple[str, list[ToolCall]]:
    body = words.strip().removeprefix(_PYTHON_TAG).strip()
    if not body.startswith("{") or '"name"' not in body:
        return words.strip(), []
    calls, decoder = [], json.JSONDecoder()
    while body:
        try:
            value, end = decoder.raw_decode(body)
        except ValueError as error:
            raise MalformedCall("the call is not JSON") from error
        calls.append(_call(value, ("parameters", "arguments")))
        body = body[end:].lstrip("; \n\t")
    return "", calls


def _json(body: str) -> Any:
    try:
        return json.loads(body)
    except ValueError as error:
        raise MalformedCall("the <tool_call> is not JSON") from error


def _call(value: Any, names: tuple[str, str]) -> ToolCall:
    arguments = next((value[name] for name in names if name in value), None) if isinstance(value, dict) else None
    if not isinstance(arguments, dict) or not isinstance(value.get("name"), str):
        raise MalformedCall(f'a call must be {{"name": "...", "{names[0]}": {{...}}}}')
    return ToolCall(value["name"], arguments)
