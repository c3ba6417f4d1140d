"""One attempt as one self-contained HTML page: every token with its version and log-probability, nothing from outside.

Everything that the model, the task or the sandbox wrote is escaped and stands in boxes of its own.
"""

from __future__ import annotations

import math

from storage.report.episode import EpisodePart
from storage.report.episode_terminal import command_words, facts, gap_words, sampled_words
from storage.report.html import templates
from storage.report.turns import TokenPart

MOST_ROWS = 4000
"""Tokens of a turn up to which the page has a table of them as well."""
SHADES = (0.9, 0.5, 0.1, 0.01)
"""Probabilities from which a token is in the next shade; the last shade is what is below them all."""


def render_episode_html(part: EpisodePart) -> str:
    """The page."""
    return (
        templates()
        .get_template("episode.html.j2")
        .render(
            part=part,
            facts=facts(part),
            sampled_words=sampled_words,
            gap_words=gap_words,
            command_words=command_words,
            shade=shade,
            most_rows=MOST_ROWS,
        )
    )


def shade(token: TokenPart) -> str:
    """The class of a token: `p0`, all but certain, to `p4`, what nobody expected; empty where it was not sampled."""
    if token.logprob is None:
        return ""
    probability = math.exp(min(0.0, token.logprob))
    return f"p{sum(probability < least for least in SHADES)}"
