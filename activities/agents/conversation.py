"""The conversations of one agent program, as the engine saw them: which call goes on which one, and from which tokens.

A request holds a whole conversation as text. Where it begins with one that was answered here, answer included, its
prompt is that one's ids, exactly as they were prompted and sampled, and then the ids of the messages after it: the ids
that train are the ids that the engine saw, whatever the program made of the text. The longest such beginning counts.
A turn that has been gone on from is forked: its ids, and all before, are the prompt of a new branch, none of them to be
trained again. A request that begins with nothing known is a branch of its own, rendered once. Called by the session.

Two texts of an answer are one where they differ in white space around them or in their thoughts only: programs drop
those, and the ids keep them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from activities.generation.activities import Prompt
from activities.generation.tool_calls import read_json, split_thoughts
from activities.generation.transcript import ChatMessage, Messages, Template, Tools
from workflows.contracts import Segment


class TooLong(Exception):
    """More text than any context of that size holds: nothing was rendered."""

    def __init__(self, chars: int) -> None:
        super().__init__(chars)
        self.chars = chars


@dataclass(eq=False)
class _Turn:
    """An answered call."""

    segments: list[Segment]
    """Of its branch, its own last."""
    token_ids: list[int]
    """The whole conversation as the engine saw and made it, the answer included."""
    extended: bool = False


@dataclass
class Place:
    """Where a call stands, and what it is sampled after."""

    prompt: Prompt
    key: str
    """Of the conversation that it was asked with."""
    answered: bool = False


@dataclass
class Conversations:
    """All of one attempt."""

    template: Template
    _turns: dict[str, _Turn] = field(default_factory=dict)
    """By the key of their conversation, the answer included."""
    _branches: int = 0

    @contextmanager
    def place(self, messages: Messages, tools: Tools, stop: Sequence[str] = (), *, most_tokens: int) -> Iterator[Place]:
        """The place of a call for the time of its sampling; without `answered` in it nothing has happened.

        Raises InvalidConfig for a conversation that the model's template refuses, and TooLong for one that can't fit
        `most_tokens`: to make tokens of megabytes would hold up everybody else."""
        keys = _keys(messages, tools)
        known = next((count for count in range(len(messages), 0, -1) if keys[count] in self._turns), 0)
        before = self._turns[keys[known]] if known else None
        chars = len(json.dumps(list(tools))) + sum(map(_chars, messages[known:]))
        if chars > most_tokens * self.template.longest_token:
            raise TooLong(chars)
        if before is None:
            added = self.template.initial(messages, tools)
            yield Place(Prompt(added, [], branch=self._branch(), stop=stop), keys[-1])
            return
        added = self.template.continuation(before.token_ids[-1], messages[known:], tools)
        if before.extended:
            origin = before.segments[-1]
            prompt = Prompt(before.token_ids + added, [], origin=origin, branch=self._branch(), stop=stop)
            yield Place(prompt, keys[-1])
            return
        before.extended = True
        place = Place(Prompt(added, before.segments, branch=before.segments[-1].branch, stop=stop), keys[-1])
        try:
            yield place
        finally:
            before.extended = place.answered

    def answered(self, place: Place, segment: Segment, said: ChatMessage) -> None:
        """Keep the answer: `said` is the message that the program was given."""
        segments = [*place.prompt.earlier, segment]
        token_ids = [token for one in segments for token in one.token_ids]
        self._turns[_next_key(place.key, said)] = _Turn(segments, token_ids)
        place.answered = True

    def _branch(self) -> int:
        self._branches += 1
        return self._branches - 1


def _chars(message: ChatMessage) -> int:
    """Of its text, and of the arguments in it."""
    calls = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    return len(message.get("content") or "") + sum(len(json.dumps(given)) for given in calls)


def _keys(messages: Messages, tools: Tools) -> list[str]:
    """Keys of the conversation's beginnings, by their number of messages."""
    keys = [hashlib.sha256(json.dumps(list(tools), sort_keys=True).encode()).hexdigest()]
    for message in messages:
        keys.append(_next_key(keys[-1], message))
    return keys


def _next_key(key: str, message: ChatMessage) -> str:
    said = json.dumps(_comparable(message), sort_keys=True)
    return hashlib.sha256(f"{key}\n{said}".encode()).hexdigest()


def _comparable(message: ChatMessage) -> list[Any]:
    """What makes a message the same one when it comes back: ids of calls and what clients add are left out."""
    text = message.get("content") or ""
    if message["role"] == "assistant":
        text = split_thoughts(text)[1].strip()
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return [message["role"], text, [(call["name"], _arguments(call["arguments"])) for call in calls]]


def _arguments(given: Any) -> Any:
    """As an object, also where they come as its JSON."""
    if not isinstance(given, str):
        return given
    try:
        return read_json(given)
    except ValueError:
        return given
