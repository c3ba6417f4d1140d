"""OpenAI's chat completions as programs speak them: requests in, answers and errors out. Pure; called by the endpoint.

What would change the distribution that is sampled from (temperature, penalties, forced calls) is the run's to say: such
wishes are accepted and have no effect, as programs send them by default. What a program could not do without, and is
not there, is refused with a sentence.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from activities.generation.server import SERVED_NAME
from activities.generation.tool_calls import CallSyntax, MalformedCall, read_calls, read_json, split_thoughts
from activities.generation.transcript import Messages
from workflows.contracts import FinishReason

UNSUPPORTED = ("functions", "function_call", "response_format", "logprobs", "top_logprobs", "audio", "prediction")
MOST_STOPS = 4


class ApiError(Exception):
    """An error in OpenAI's shape. `code` is for programs; clients repeat nothing of it by themselves."""

    def __init__(self, status: int, message: str, *, code: str, type: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code, self.type = status, code, type

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.type, "param": None, "code": self.code}}


class ChatRequest(BaseModel):
    """What is read of a request; the rest has no effect."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] = []
    tool_choice: Any = None
    stream: bool = False
    stream_options: dict[str, Any] = {}
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: int = 1
    stop: list[str] = Field([], max_length=MOST_STOPS)

    @classmethod
    def parse(cls, body: bytes) -> ChatRequest:
        """Raises ApiError, 400."""
        try:
            raw = read_json(body)
        except ValueError as error:
            raise _bad("the body is not JSON") from error
        if not isinstance(raw, dict):
            raise _bad("the body must be a JSON object")
        for name in UNSUPPORTED:
            if raw.get(name) not in (None, False, {"type": "text"}):
                raise _bad(f"{name} is not supported here", code="unsupported_parameter")
        given = {name: value for name, value in raw.items() if value is not None}
        if "stop" in given:
            stops = given["stop"] if isinstance(given["stop"], list) else [given["stop"]]
            # Some programs send an empty one for none; it would end every answer before it began.
            given["stop"] = [text for text in stops if text != ""]
        try:
            request = cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            raise _bad(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        if request.n != 1:
            raise _bad("n above 1 is not supported here: each answer is a turn", code="unsupported_parameter")
        return request

    @property
    def most_tokens(self) -> int | None:
        """What the program wants at most."""
        wanted = [value for value in (self.max_tokens, self.max_completion_tokens) if value is not None]
        return min(wanted, default=None)

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options.get("include_usage"))

    def conversation(self) -> Messages:
        """The messages as templates want them: text in place of parts, arguments as objects. Raises ApiError, 400."""
        return [_message(index, message) for index, message in enumerate(self.messages)]


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise _bad(f"messages.{index}: a message needs a role")
    # OpenAI's newer name for it, which open models' templates do not know.
    out: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": _text(index, message)}
    if calls := message.get("tool_calls"):
        out["tool_calls"] = [_call(index, call) for call in calls]
    return out | {name: message[name] for name in ("name", "tool_call_id") if isinstance(message.get(name), str)}


def _text(index: int, message: dict[str, Any]) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise _bad(f"messages.{index}: only text is supported here", code="unsupported_content")
    return "".join(part["text"] for part in parts)


def _call(index: int, call: Any) -> dict[str, Any]:
    try:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
    except (LookupError, TypeError) as error:
        raise _bad(f"messages.{index}: a tool call needs function.name and function.arguments") from error
    if isinstance(arguments, str):
        # Programs repair or cut what a model wrote; templates take a text as it is.
        with suppress(ValueError):
            arguments = read_json(arguments)
    return {"type": "function", "id": str(call.get("id", "")), "function": {"name": name, "arguments": arguments}}


def _bad(message: str, *, code: str = "invalid_request") -> ApiError:
    return ApiError(400, message, code=code)


@dataclass(frozen=True)
class Completion:
    """An answer of the policy as a program sees it."""

    turn: int
    said: dict[str, Any]
    """The assistant's message."""
    finish: str
    """OpenAI's word: stop, length or tool_calls."""
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int

    @property
    def _head(self) -> dict[str, Any]:
        return {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": SERVED_NAME}

    @property
    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.sampled_tokens,
            "total_tokens": self.prompt_tokens + self.sampled_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    @property
    def body(self) -> dict[str, Any]:
        choice = {"index": 0, "message": self.said, "finish_reason": self.finish, "logprobs": None}
        return self._head | {"object": "chat.completion", "choices": [choice], "usage": self._usage}

    def chunks(self, *, usage: bool) -> Iterator[dict[str, Any]]:
        """The same for a program that wants it in pieces."""
        head = self._head | {"object": "chat.completion.chunk"}

        def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
            return head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]}

        yield chunk({"role": "assistant", "content": ""})
        if self.said.get("reasoning_content"):
            yield chunk({"reasoning_content": self.said["reasoning_content"]})
        if self.said["content"]:
            yield chunk({"content": self.said["content"]})
        if calls := self.said.get("tool_calls"):
            yield chunk({"tool_calls": [{"index": index} | call for index, call in enumerate(calls)]})
        yield chunk({}, self.finish)
        if usage:
            yield head | {"choices": [], "usage": self._usage}


def said_by(
    text: str, turn: int, finish: FinishReason, *, syntax: CallSyntax | None, stop: list[str]
) -> tuple[dict[str, Any], str]:
    """(the assistant's message, OpenAI's finish reason) of a sampled text. Calls are read where `syntax` is given; what
    is no call, and what is a broken one, is content: the program's to judge."""
    for end in stop:
        text = text.partition(end)[0]
    thoughts, words = split_thoughts(text)
    calls: list[dict[str, Any]] = []
    if syntax is not None:
        # What was nested deeply enough to be read may still be too deep to be written.
        with suppress(MalformedCall, RecursionError):
            beside, found = read_calls(words, syntax)
            calls = [
                {
                    "id": f"call_{turn}_{index}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for index, call in enumerate(found)
            ]
            words = beside
    said: dict[str, Any] = {"role": "assistant", "content": words or (None if calls else "")}
    if thoughts:
        said["reasoning_content"] = thoughts
    if calls:
        said["tool_calls"] = calls
        return said, "tool_calls"
    return said, "length" if finish is FinishReason.LENGTH else "stop"
