"""From a conversation to token ids and back: tokens in, tokens out, nothing tokenised twice.

The first prompt is rendered once. A later prompt is the ids of the turns so far, exactly as they were prompted and
sampled, then the ids that the template puts between an answer and the next: the end of the turn, the observation, the
generation prompt. Those are found by rendering two short conversations that differ in their answer only: what both end
with is the template's, whatever the template does with earlier turns. The record of a turn marks what was sampled;
text is for people and for the action. Called by the generate activity and by the agents' endpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError

# At import, not at first use: two threads that resolve transformers' lazy names at once break each other. And not
# AutoTokenizer, which would bring torch into every rollout worker.
from transformers import PreTrainedTokenizerFast

from activities.generation.tool_calls import CallSyntax
from workflows.errors import InvalidConfig

ChatMessage = Mapping[str, Any]
"""As OpenAI's, but that a call's arguments are an object and not its JSON. Example: {"role": "user", "content": "q"}"""
Messages = Sequence[ChatMessage]
Tools = Sequence[Mapping[str, Any]]
"""OpenAI's: {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}"""

_QUESTION = {"role": "user", "content": "q"}
_ANSWERS = ("a", "0 b")
"""Two answers without a common last character: no token of one can be the other's."""
_PROBE: Tools = [
    {
        "type": "function",
        "function": {"name": "probe", "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
]
_READING = threading.Lock()
"""The first answers of many episodes ask at once: one reads, the others find it read."""


class Bridge(NamedTuple):
    """What the template puts after an answer: what may stand before the end of the turn, the end itself, the rest."""

    end_of_turn: list[int]
    rest: list[int]


class Template:
    """One model's tokenizer and chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
        self.end_of_turn: int = self._bridge([_QUESTION], ()).end_of_turn[-1]
        """The template's own last token of an answer; generation stops at it, whatever the tokenizer's EOS is."""

    @classmethod
    def load(cls, model: str) -> Template:
        """The template of a model folder, kept until its tokenizer changes. Raises InvalidConfig (final)."""
        stamps = [path.stat().st_mtime_ns for path in sorted(Path(model).glob("*token*"))]
        with _READING:
            return _read(model, tuple(stamps))

    @cached_property
    def call_syntax(self) -> CallSyntax | None:
        """How the model writes a tool call, as its template shows it; None for a template that renders no tools, or has
        them called in another way."""
        written = str(self._tokenizer.chat_template)
        if self._render([_QUESTION], _PROBE, generate=True) == self._render([_QUESTION], (), generate=True):
            return None
        if "<tool_call>" in written:
            return CallSyntax.HERMES
        return CallSyntax.LLAMA3 if '"parameters"' in written else None

    @cached_property
    def longest_token(self) -> int:
        """Characters: no token has more of them."""
        return max(map(len, self._tokenizer.get_vocab()))

    def initial(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """Ids of the first prompt, generation prompt included. Raises InvalidConfig where BOS would come twice, and for
        a conversation that the template refuses."""
        ids = self._render(messages, tools, generate=True)
        bos = self._tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise InvalidConfig("model: its chat template and its tokenizer both write BOS")
        return ids

    def continuation(self, last: int, added: ChatMessage | Messages, tools: Tools = ()) -> list[int]:
        """Ids between an answer whose last sampled token is `last` and the next answer, `added` between them.

        The end of the turn is left out where it was sampled. Raises InvalidConfig for messages that the template
        refuses.
        """
        bridge = self._bridge([added] if isinstance(added, Mapping) else added, tools)
        return bridge.rest if last == self.end_of_turn else bridge.end_of_turn + bridge.rest

    def encode(self, text: str) -> list[int]:
        """Ids of an answer that a demonstrator wrote, for a supervised start; sampled text never comes here."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def text(self, token_ids: list[int]) -> str:
        """The sampled tokens as text, special tokens left out, invalid UTF-8 replaced. Never tokenised again."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _bridge(self, added: Messages, tools: Tools) -> Bridge:
        one, other = (
            self._render([_QUESTION, {"role": "assistant", "content": answer}, *added], tools, generate=True)
            for answer in _ANSWERS
        )
        common = 0
        while common < min(len(one), len(other)) and one[-1 - common] == other[-1 - common]:
            common += 1
        tail = one[len(one) - common :]
        end = next((index for index, token in enumerate(tail) if token in self._special), None)
        if end is None:
            raise InvalidConfig("model: its chat template ends an answer with no special token")
        return Bridge(end_of_turn=tail[: end + 1], rest=tail[end + 1 :])

    def _render(self, messages: Messages, tools: Tools, *, generate: bool) -> list[int]:
        try:
            ids = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=True,
                add_generation_prompt=generate,
                return_dict=False,
            )
        except (TemplateError, TypeError) as error:
            raise InvalidConfig(f"model: its chat template refuses the conversation: {error}") from error
        return [int(token) for token in ids]


@lru_cache(maxsize=4)
def _read(model: str, _stamps: tuple[int, ...]) -> Template:
    if not Path(model, "tokenizer.json").is_file():
        raise InvalidConfig(f"model: {model} has no tokenizer.json")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model, local_files_only=True)
    if tokenizer.chat_template is None:
        raise InvalidConfig(f"model: {model} has no chat template")
    return Template(tokenizer)
