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

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_CALL = re.compile(f"{_OPENING}(.*?){_CLOSING}", re.DOTALL)
_HALVES = re.compile("[\ud800-\udfff]")
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


def tagged_calls(text: str) -> tuple[list[str], str]:
    """(what stands between the tags of each call, the text beside them). Raises MalformedCall for a tag alone."""
    # Behind the last closing tag is no call: opening ones that a policy repeats must not each be searched from.
    end = text.rfind(_CLOSING) + len(_CLOSING) if _CLOSING in text else 0
    whole, after = text[:end], text[end:]
    beside = _CALL.sub("", whole) + after
    if _OPENING in beside or _CLOSING in beside:
        raise MalformedCall("the <tool_call> is not closed")
    return _CALL.findall(whole), beside


def read_json(text: str | bytes) -> Any:
    """What somebody else wrote as JSON. Halves of characters, which JSON can name and no text can hold, are replaced:
    neither tokenizers nor messages take them. Raises ValueError, also for what is nested deeper than Python reads."""
    try:
        value = json.loads(text)
        whole, halves = _HALVES.subn("\ufffd", json.dumps(value, ensure_ascii=False))
        return json.loads(whole) if halves else value
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _hermes(words: str) -> tuple[str, list[ToolCall]]:
    bodies, beside = tagged_calls(words)
    return beside.strip(), [_call(_json(body), ("arguments", "parameters")) for body in bodies]


def _llama3(words: str) -> tuple[str, list[ToolCall]]:
    body = words.strip().removeprefix(_PYTHON_TAG).strip()
    if not body.startswith("{") or '"name"' not in body:
        return words.strip(), []
    calls, decoder = [], json.JSONDecoder()
    while body:
        try:
            _, end = decoder.raw_decode(body)
            value = read_json(body[:end])
        except (ValueError, RecursionError) as error:
            raise MalformedCall("the call is not JSON") from error
        calls.append(_call(value, ("parameters", "arguments")))
        body = body[end:].lstrip("; \n\t")
    return "", calls


def _json(body: str) -> Any:
    try:
        return read_json(body)
    except ValueError as error:
        raise MalformedCall("the <tool_call> is not JSON") from error


def _call(value: Any, names: tuple[str, str]) -> ToolCall:
    arguments = next((value[name] for name in names if name in value), None) if isinstance(value, dict) else None
    if not isinstance(arguments, dict) or not isinstance(value.get("name"), str):
        raise MalformedCall(f'a call must be {{"name": "...", "{names[0]}": {{...}}}}')
    return ToolCall(value["name"], arguments)
