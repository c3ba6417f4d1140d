"""Attempts of an agent that writes what it likes: segments, and the whole told without a database."""

from __future__ import annotations

from activities.generation.harness import observation_message
from activities.generation.transcript import Template
from storage.report.episode import EpisodePart, EpisodeRows, UsePart, tell
from storage.tables import Episode, Run, Turn
from tests.generation.policies import CHATML, make_tokenizer
from workers.token_texts import ModelTexts
from workflows.contracts import FinishReason, Segment

HOSTILE = (
    "<script>alert(1)</script> <img src=x onerror=alert(2)> [bold]loud[/bold] [link=http://evil]x[/link]\n"
    "\x1b[31mred\x1b[0m \x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\ \x1b]0;title\x07 \x9b2J \u202etxt.exe\n"
    "```bash\nls '\"&' {{ 7 * 7 }}\n```"
)


def segment(turn: int, added: list[int], sampled: list[int], *, versions: list[int], text: str) -> Segment:
    return Segment(
        turn=turn,
        token_ids=added + sampled,
        loss_mask=[0] * len(added) + [1] * len(sampled),
        logprobs=[0.0] * len(added) + [-0.05 * place for place in range(len(sampled))],
        versions=[-1] * len(added) + versions,
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        text=text,
        engine="local-e0",
    )


def segments(template: Template, said: str, seen: str, *, invalid: bool = False) -> list[Segment]:
    """Two turns: `said`, whose observation is `seen`, and an answer. `invalid`: the first holds half a character."""
    prompt = template.initial([{"role": "user", "content": "How many cats?"}])
    half = template.encode("é")[:1] if invalid else []
    first = [*template.encode(said), *half, template.end_of_turn]
    added = template.continuation(first[-1], observation_message(seen))
    second = [*template.encode("Answer: 3"), template.end_of_turn]
    return [
        segment(0, prompt, first, versions=[3] * 4 + [4] * (len(first) - 4), text=template.text(first)),
        segment(1, added, second, versions=[4] * len(second), text="Answer: 3"),
    ]


def told(said: str) -> EpisodePart:
    """One attempt that wrote `said`, and wrote it into everything else that it has a hand in."""
    template = Template(make_tokenizer(CHATML, eos="<|im_end|>"))
    made = segments(template, said, said, invalid=True)
    row = Episode(
        id="r/g0/e1/a0",
        episode_id="r/g0/e1",
        group_id="r/g0",
        run="r",
        kind="train",
        task="shell/count-17",
        attempt=0,
        outcome="model_failure",
        stop_reason="tampered",
        tampered=True,
        reward=0.0,
        why=said,
        evidence={said: said},
        started_at=1.0,
        ended_at=2.0,
    )
    rows = EpisodeRows(
        episode=row,
        turns=[Turn(episode=row.id, turn=turn, segment="s", engine=said, action=said) for turn in range(3)],
        run=Run(id="r", state="finished", config={"model": "tiny"}, mode="sync", seed=0, started_at=1.0),
        instruction=said,
        others=[],
        uses=[UsePart(batch="r/b1", step=1, state="void", reason=said, group="r/g0", advantage=None, replayed=False)],
        versions=[],
        checkpoint="",
        scores_key="",
    )
    found: dict[int, Segment | str] = {0: made[0], 1: made[1], 2: said}
    return tell(rows, found, ModelTexts(template), ui="http://127.0.0.1:8233/x", notes=[said])
