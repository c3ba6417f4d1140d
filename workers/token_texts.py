"""What a run's episodes say, token by token: their segments out of the object store, and the words of their tokens.

Called by `ratchet episode`. A segment that is gone is a sentence in its place; so is a tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from storage.objects import MissingObject, ObjectStore
from storage.scores import Scores, read_scores
from workflows.contracts import Segment
from workflows.errors import InvalidConfig, StorageError

if TYPE_CHECKING:
    from activities.generation.transcript import Template

LONGEST_CHARACTER = 8
"""Tokens that may make one character; more of them without a character are no text."""


class ModelTexts:
    """`storage.report.episode.Texts` of one model's tokenizer."""

    def __init__(self, template: Template) -> None:
        self._template = template

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        return pieces(self._template.text, token_ids)

    def observation(self, answer: Segment, following: Segment) -> str:
        from activities.replay.recorded import observed

        return observed(self._template, answer, following)


def model_texts(model: str, models_dir: Path) -> tuple[ModelTexts | None, str]:
    """(the model's words, a note where they are gone)."""
    from activities.generation.transcript import Template
    from workflows.config import model_folder

    try:
        return ModelTexts(Template.load(str(model_folder(model, models_dir)))), ""
    except InvalidConfig as error:
        return None, f"the run's tokenizer can't be read, so tokens are shown by their ids ({error})"


def scores_of(store: ObjectStore, key: str) -> tuple[Scores | None, str]:
    """(the trainer's log-probabilities of a batch, a note where they can't be read). A step of before they were kept,
    or one that came to no scoring, has none."""
    try:
        return read_scores(store, key), ""
    except MissingObject:
        return None, ""
    except (StorageError, ValueError) as error:
        return None, f"the trainer's log-probabilities {key} can't be read: {str(error).splitlines()[0]}"


def pieces(text: Callable[[list[int]], str], token_ids: Sequence[int]) -> list[str]:
    """The part of the text that each token brings, in its place among the others: a tokenizer may write a token
    otherwise when it stands alone. A character that several tokens make is the last one's."""
    found: list[str] = []
    context, begin = 0, 0
    for end in range(1, len(token_ids) + 1):
        known = text(list(token_ids[context:begin]))
        whole = text(list(token_ids[context:end]))
        if whole.endswith("\ufffd") and end < len(token_ids) and end - begin < LONGEST_CHARACTER:
            found.append("")
            continue
        found.append(whole[len(known) :])
        context, begin = begin, end
    return found


def read_segments(store: ObjectStore, keys: dict[int, str]) -> dict[int, Segment | str]:
    """By turn its segment, or why it can't be shown. A store that does not answer is asked once."""
    found: dict[int, Segment | str] = {}
    unreachable = ""
    for turn, key in keys.items():
        found[turn] = unreachable
        if unreachable:
            continue
        try:
            found[turn] = _aligned(Segment.model_validate_json(store.get(key)))
        except MissingObject:
            found[turn] = f"its segment {key} is not in the object store any more"
        except StorageError as error:
            found[turn] = unreachable = f"the object store can't be read: {error}"
        except ValueError as error:
            found[turn] = f"its segment {key} can't be read: {str(error).splitlines()[0]}"
    return found


def _aligned(segment: Segment) -> Segment:
    """Raises ValueError for lists of different lengths."""
    lengths = {len(part) for part in (segment.token_ids, segment.loss_mask, segment.logprobs, segment.versions)}
    if len(lengths) > 1:
        raise ValueError(f"its lists are of lengths {sorted(lengths)}")
    return segment
