"""`ratchet episode`, over a real database, object store and tokenizer, of an agent that writes what it likes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlmodel import select

from activities.generation.transcript import Template
from storage import queries
from storage.database import session
from storage.objects import ObjectStore
from storage.report.words import NONE
from storage.scores import Scores, scores_key, write_scores
from storage.tables import Batch, BatchMember, PolicyVersion, Run, Turn
from tests.conftest import S3
from tests.generation.policies import CHATML, make_tokenizer
from tests.lineage.commands import ratchet
from tests.lineage.episodes import HOSTILE, segments
from tests.lineage.pages import Page
from tests.storage import rows
from workers.token_texts import pieces
from workflows.contracts import EpisodeRecord, Segment, TurnRecord

ATTEMPT = "r/g0/e1/a0"
KEPT = scores_key("r", 5, 0)


@dataclass
class Recorded:
    """An attempt of two turns in the stores that the environment names."""

    store: ObjectStore
    database: Engine
    models: Path
    keys: list[str] = field(default_factory=list)

    def play(self, said: str = "cat ⟨é⟩", seen: str = "a cat", *, invalid: bool = False) -> None:
        tokenizer = make_tokenizer(CHATML, eos="<|im_end|>")
        tokenizer.save_pretrained(self.models / "tiny")
        for made in segments(Template(tokenizer), said, seen, invalid=invalid):
            self.put(made)
        self.record()

    def put(self, made: Segment) -> None:
        self.keys.append(f"runs/r/trajectories/g0/e1/a0/t{made.turn}-1.json")
        self.store.put(self.keys[-1], made.model_dump_json().encode())

    def record(self, **changes: object) -> None:
        command = {"exit_code": 2, "output_digest": "5e" * 32, "act_s": 1.5, "queue_s": 0.25}
        turn = {"engine": "local-e0", "min_version": 3, "max_version": 4, "prompt_tokens": 60, "cached_tokens": 48}
        turns = [
            TurnRecord(turn=0, segment=self.keys[0], action="cat", sampled_tokens=9, **turn, **command),
            TurnRecord(turn=1, segment=self.keys[1], action="Answer: 3", sampled_tokens=10, **turn),
        ]
        ended = {
            "turns": turns,
            "why": "answered '3'; check: exit 0",
            "image_id": "sha256:77",
            "evidence": {"canary": "ok"},
        }
        record = EpisodeRecord.model_validate(rows.record(ATTEMPT).model_dump() | ended | changes)
        with session(self.database) as opened:
            opened.add(Run(id="r", state="finished", config={"model": "tiny"}, mode="async", seed=0, started_at=1.0))
            opened.flush()
            queries.put_episode(opened, record=record)
            opened.add(Batch(id="r/b5", run="r", step=5, policy_version=4, state="published", reserved_at=1.0))
            opened.flush()
            opened.add(BatchMember(episode=ATTEMPT, batch="r/b5", group_id="r/g0", position=1, advantage=0.75))
            for version in (5, 6):
                key = f"runs/r/checkpoints/{version}/manifest.json"
                opened.add(PolicyVersion(run="r", version=version, step=version, checkpoint=key, created_at=1.0))


@pytest.fixture
def recorded(
    home: Path, database: Engine, object_store: ObjectStore, s3_endpoint: S3, monkeypatch: pytest.MonkeyPatch
) -> Recorded:
    endpoint, access, secret = s3_endpoint
    settings = {"ENDPOINT": endpoint, "BUCKET": object_store.bucket, "ACCESS_KEY": access, "SECRET_KEY": secret}
    for name, value in settings.items():
        monkeypatch.setenv(f"RATCHET_S3_{name}", value)
    return Recorded(object_store, database, home / "models")


def test_an_episode_is_told_with_what_it_saw_said_and_did_and_what_it_trained(recorded: Recorded) -> None:
    recorded.play()
    out = ratchet("episode", ATTEMPT).stdout
    assert "model success: finished, answered '3'; check: exit 0" in out
    assert "r/b5 (step 5, published), advantage +0.750" in out and "5 to 6" in out
    assert "runs/r/checkpoints/5/manifest.json" in out and "sha256:77" in out and "evidence: canary" in out
    assert "http://127.0.0.1:8233/namespaces/default/workflows/r%2Fg0%2Fe1%2Fa0" in out
    assert "│ How many cats?" in out and "▌ cat ⟨é⟩" in out and "│ a cat" in out and "▌ Answer: 3" in out
    assert "9 tokens by local-e0 at version 3 to 4 (not ended), logprob mean -0.25, lowest -0.50;" in out
    assert "48 of 60 prompt tokens from cache" in out
    assert "by version 3, logprob mean" in out and "by version 4, logprob mean" in out
    assert "exit 2 after 1.5 s, output 5e5e5e5e5e5e; generated in 0 ms, waited 250 ms" in out
    assert "no command; generated" in out


def test_an_episodes_id_stands_for_its_last_attempt(recorded: Recorded) -> None:
    recorded.play()
    assert ratchet("episode", "r/g0/e1").stdout.startswith(ATTEMPT)


def test_every_token_can_be_seen_in_figures(recorded: Recorded) -> None:
    recorded.play()
    out = ratchet("episode", ATTEMPT, "--tokens").stdout
    lines = [line.split() for line in out.splitlines()]
    assert ["'cat'", "yes", "3", "0.000", NONE] in [line[-5:] for line in lines if line]
    told = json.loads(ratchet("episode", ATTEMPT, "--json").stdout)
    first = told["turns"][0]
    sampled = [token for token in first["tokens"] if token["sampled"]]
    assert "".join(token["text"] for token in sampled) == first["text"] == "cat ⟨é⟩"
    assert [token["version"] for token in sampled] == [3] * 4 + [4] * (len(sampled) - 4)
    assert all(
        token["logprob"] is None and token["version"] is None for token in first["tokens"] if not token["sampled"]
    )
    assert [(span["version"], span["tokens"]) for span in first["spans"]] == [(3, 4), (4, len(sampled) - 4)]
    assert told["turns"][1]["before"] == "a cat"


def test_the_gap_to_the_trainer_is_told_by_token_and_turn(recorded: Recorded, tmp_path: Path) -> None:
    recorded.play()
    counts = [sum(Segment.model_validate_json(recorded.store.get(key)).loss_mask) for key in recorded.keys]
    engine = [-0.05 * place for count in counts for place in range(count)]
    engine[counts[0]] += 0.25
    write_scores(recorded.store, KEPT, Scores(policy_version=4, logprobs={ATTEMPT: [engine], "r/g0/e2/a0": [[-1]]}))
    path = tmp_path / "episode.html"
    out, text = ratchet("episode", ATTEMPT, "--tokens", "--html", str(path)).stdout, path.read_text()
    mean = 0.25 / counts[1]
    assert "logprob gap to the trainer at version 4: mean 0.0000 nats" in out and "other weights, so age and" in out
    assert re.search(rf"mean {mean:.4f} nats, widest \+0.2500 at token \d+; the same weights, so numerics alone", out)
    assert ["'cat'", "yes", "3", "0.000", "+0.0000"] in [line.split()[-5:] for line in out.splitlines()]
    assert text.count("gap +0.2500") == 1 and "<td>+0.2500</td>" in text and f"mean {mean:.4f} nats" in text
    told = json.loads(ratchet("episode", ATTEMPT, "--json").stdout)
    scored = [token["trainer_logprob"] for turn in told["turns"] for token in turn["tokens"] if token["sampled"]]
    assert scored == pytest.approx(engine) and {turn["trainer_version"] for turn in told["turns"]} == {4}


@pytest.mark.parametrize("scores", [{}, {ATTEMPT: [[-1.0]]}, {ATTEMPT: []}])
def test_scores_of_other_tokens_are_not_shown(recorded: Recorded, scores: dict[str, list[list[float]]]) -> None:
    recorded.play()
    write_scores(recorded.store, KEPT, Scores(policy_version=4, logprobs=scores))
    assert "logprob gap" not in ratchet("episode", ATTEMPT).stdout


def test_scores_that_cannot_be_read_are_said_and_the_rest_is_shown(recorded: Recorded) -> None:
    recorded.play()
    recorded.store.put(KEPT, b"damaged")
    out = ratchet("episode", ATTEMPT).stdout
    assert f"the trainer's log-probabilities {KEPT} can't be read: " in out and "▌ Answer: 3" in out


def test_the_page_shows_every_token_with_its_version_and_asks_nothing_of_anybody(
    recorded: Recorded, tmp_path: Path
) -> None:
    recorded.play()
    path = tmp_path / "deep" / "episode.html"
    assert ratchet("episode", ATTEMPT, "--html", str(path)).stdout.splitlines()[-1] == str(path)
    text = path.read_text()
    page = Page(text)
    assert page.open == [] and page.scripts == 0
    assert page.asks == ["a href=http://127.0.0.1:8233/namespaces/default/workflows/r%2Fg0%2Fe1%2Fa0"]
    assert '<sup>v3</sup><i class="p0" title="0.000 nats, version 3, id 257">cat</i>' in text
    assert text.count("<sup>v4</sup>") == 2 and "How many cats?" in text
    assert "prefers-color-scheme: dark" in text and ":focus-visible" in text and text.count("<caption>") == 2
    said = [
        re.sub(r"<sup>.*?</sup>|<[^>]+>", "", part) for part in re.findall(r'<pre class="said".*?</pre>', text, re.S)
    ]
    assert unescape(said[0]).startswith("cat ⟨") and unescape(said[1]).startswith("Answer: 3⟨")


def test_what_a_model_wrote_is_words_and_nothing_else_in_terminal_and_page(recorded: Recorded, tmp_path: Path) -> None:
    recorded.play(HOSTILE, seen=HOSTILE, invalid=True)
    path = tmp_path / "episode.html"
    out = ratchet("episode", ATTEMPT, "--tokens", "--html", str(path)).stdout
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", out)
    assert "[bold]loud[/bold] [link=http://evil]x[/link]" in out and "red click" in out and "\ufffd" in out
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == [] and page.scripts == 0 and page.handlers == []
    assert [ask for ask in page.asks if "8233" not in ask] == []
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text and "{{ 7 * 7 }}" in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
    assert "\ufffd" in text


def test_what_an_engine_called_itself_is_words_too(recorded: Recorded, database: Engine) -> None:
    recorded.play()
    with session(database) as opened:
        for turn in opened.exec(select(Turn)).all():
            turn.engine, turn.finish_reason = "e\x1b[31m\x9d0;own\u202e", "stop\x1b]0;x\x07"
            opened.add(turn)
    out = ratchet("episode", ATTEMPT).stdout
    assert "tokens by e" in out and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", out)


def test_a_segment_that_is_gone_is_said_and_the_rest_is_shown(recorded: Recorded, tmp_path: Path) -> None:
    recorded.play()
    recorded.store.delete(recorded.keys[:1])
    path = tmp_path / "episode.html"
    out = ratchet("episode", ATTEMPT, "--html", str(path)).stdout
    assert f"its segment {recorded.keys[0]} is not in the object store any more" in out
    assert "its action began: cat" in out and "▌ Answer: 3" in out and "│ user" in out
    assert recorded.keys[0] in path.read_text() and "exit 2 after 1.5 s" in out


@pytest.mark.parametrize("data", [b"\xff not json", b'{"turn": 0}', b'{"token_ids": [1, 2]}'])
def test_a_segment_that_cannot_be_read_is_said_and_the_rest_is_shown(recorded: Recorded, data: bytes) -> None:
    recorded.play()
    whole = json.loads(recorded.store.get(recorded.keys[0]))
    mixed = json.dumps(whole | json.loads(data)).encode() if data.endswith(b"2]}") else data
    recorded.store.put(recorded.keys[0], mixed)
    out = ratchet("episode", ATTEMPT).stdout
    assert f"its segment {recorded.keys[0]} can't be read: " in out and "▌ Answer: 3" in out


def test_a_store_that_does_not_answer_is_said_and_the_rows_are_shown(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded.play()
    monkeypatch.setenv("RATCHET_S3_ENDPOINT", "http://127.0.0.1:9")
    out = ratchet("episode", ATTEMPT).stdout
    assert out.count("the object store can't be read") == 2 and "r/b5 (step 5, published)" in out


def test_without_the_runs_tokenizer_tokens_are_shown_by_their_ids(recorded: Recorded, tmp_path: Path) -> None:
    recorded.play()
    for file in (recorded.models / "tiny").iterdir():
        file.unlink()
    path = tmp_path / "episode.html"
    out = ratchet("episode", ATTEMPT, "--tokens", "--html", str(path)).stdout
    assert "tokens are shown by their ids" in out and "▌ cat ⟨é⟩" in out and "How many cats?" not in out
    assert ">⟨257⟩</i>" in path.read_text()


def test_an_attempt_without_a_turn_or_a_batch_is_told_with_what_there_is(recorded: Recorded, database: Engine) -> None:
    recorded.keys = ["a", "b"]
    recorded.record(turns=[], outcome="infra_failure", stop_reason="sandbox_lost", reward=None)
    with session(database) as opened:
        opened.delete(opened.get_one(BatchMember, ATTEMPT))
    out = ratchet("episode", ATTEMPT).stdout
    assert "infra failure: sandbox lost" in out and "no batch holds it" in out and "turn 0" not in out


def test_an_id_that_is_not_there_is_answered_with_what_ids_look_like(recorded: Recorded) -> None:
    result = ratchet("episode", "r/g9/e9", code=1)
    assert "no episode 'r/g9/e9'; ids look like <run>/g<n>/e<k>/a<m>" in result.stderr and result.stdout == ""


@pytest.mark.parametrize("text", ["cat cat", "naïve 日本 🙂", "🙂" * 5, ""])
def test_the_pieces_of_tokens_make_the_text_and_a_character_belongs_to_its_last_token(text: str) -> None:
    template = Template(make_tokenizer(CHATML, eos="<|im_end|>"))
    ids = template.encode(text)
    found = pieces(template.text, ids)
    assert len(found) == len(ids) and "".join(found) == text


def test_bytes_that_are_no_text_have_a_piece_each_way() -> None:
    template = Template(make_tokenizer(CHATML, eos="<|im_end|>"))
    half = template.encode("é")[:1]
    assert "".join(pieces(template.text, [*half * 40, *template.encode("cat")])) == "\ufffd" * 40 + "cat"
