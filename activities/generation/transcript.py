"""From a conversation to token ids and back: tokens in, tokens out, nothing tokenised twice.

The first prompt is rendered once. A later prompt is the ids of the turns so far, exactly as they were prompted and
sampled, then the ids that the template puts between an answer and the next: the end of the turn, the observation, the
generation prompt. Those are found by rendering two short conversations that differ in their answer only: what both end
with is the template's, whatever the template does with earlier turns. The record of a turn marks what was sampled;
text is for people and for the action. Called by the generate activity.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

# At import, not at first use: two threads that resolve transformers' lazy names at once break each other. And not
# AutoTokenizer, which would bring torch into every rollout worker.
from transformers import PreTrainedTokenizerFast

from workflows.errors import InvalidConfig

Messages = Sequence[dict[str, str]]

_QUESTION = {"role": "user", "content": "q"}
_ANSWERS = ("a", "0 b")
"""Two answers without a common last character: no token of one can be the other's."""
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
        self.end_of_turn: int = self._bridge(_QUESTION).end_of_turn[-1]
        """The template's own last token of an answer; generation stops at it, whatever the tokenizer's EOS is."""

    @classmethod
    def load(cls, model: str) -> Template:
        """The template of a model folder, kept until its tokenizer changes. Raises InvalidConfig (final)."""
        stamps = [path.stat().st_mtime_ns for path in sorted(Path(model).glob("*token*"))]
        with _READING:
            return _read(model, tuple(stamps))

    def initial(self, messages: Messages) -> list[int]:
        """Ids of the first prompt, generation prompt included. Raises InvalidConfig where BOS would come twice."""
        ids = self._render(messages, generate=True)
        bos = self._tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise InvalidConfig("model: its chat template and its tokenizer both write BOS")
        return ids

    def continuation(self, last: int, observation: dict[str, str]) -> list[int]:
        """Ids between an answer whose last sampled token is `last` and the next answer.

        The end of the turn is left out where it was sampled.
        """
        bridge = self._bridge(observation)
        return bridge.rest if last == self.end_of_turn else bridge.end_of_turn + bridge.rest

    def encode(self, text: str) -> list[int]:
        """Ids of an answer that a demonstrator wrote, for a supervised start; sampled text never comes here."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def text(self, token_ids: list[int]) -> str:
        """The sampled tokens as text, special tokens left out, invalid UTF-8 replaced. Never tokenised again."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _bridge(self, observation: dict[str, str]) -> Bridge:
        one, other = (
            self._render([_QUESTION, {"role": "assistant", "content": answer}, observation], generate=True)
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

    def _render(self, messages: Messages, *, generate: bool) -> list[int]:
        ids = self._tokenizer.apply_chat_template(
            list(messages), tokenize=True, add_generation_prompt=generate, return_dict=False
        )
        return [int(token) for token in ids]


@lru_cache(maxsize=4)
def _read(model: str, _stamps: tuple[int, ...]) -> Template:
    if not Path(model, "tokenizer.json").is_file():
        raise InvalidConfig(f"model: {model} has no tokenizer.json")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model, local_files_only=True)
    if tokenizer.chat_template is None:
        raise InvalidConfig(f"model: {model} has no chat template")
    return Template(tokenizer)
