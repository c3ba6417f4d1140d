"""Text that a model, a task or a machine wrote, on its way through object keys, SQL, page and terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sqlalchemy import Engine, func, inspect
from sqlmodel import Session, col, select

from activities.generation.activities import GenerationActivities
from activities.sandbox.channel import key_of
from activities.sandbox.docker import DockerBackend
from storage import queries
from storage.database import session
from storage.objects import ObjectStore
from storage.report import build_report, render_html
from storage.tables import Episode, Group, Run, Turn
from tasksets.base import Task
from tasksets.folder import FolderTaskset
from tests.generation.fakes import FakeEngine, choice
from tests.generation.policies import CHATML, make_tokenizer
from tests.generation.test_generate import message, model, run
from tests.generation.test_routing import pool_of
from tests.lineage.commands import ratchet
from tests.lineage.pages import Page
from tests.storage import rows
from tests.storage.troubles import put_attempt
from workflows.contracts import Split, StopReason, TaskRef, TurnRecord
from workflows.errors import InvalidConfig

__all__ = ["model"]

TEXTS = {
    "sql": "x'; DROP TABLE episode; UPDATE run SET state = 'finished' WHERE ''='",
    "sql comment": 'r"); DELETE FROM turn; --',
    "like": "%_%' OR 1=1 /*",
    "script": "\"></td><script>alert(1)</script><img src=x onerror='alert(2)'>",
    "svg": "</style></svg><svg/onload=alert(1)>",
    "template": "{{ 7 * 7 }}{% for x in range(9) %}{{ x }}{% endfor %}",
    "path": "../../../../etc/passwd",
    "key": "runs/other/checkpoints/1/manifest.json",
    "title": "\x1b]0;owned\x07\x1b[2J\x1b[31mred",
    "link": "\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\",
    "direction": "\u202egnp.exe \u2066x",
    "markup": "[bold red]loud[/bold red] [link=http://evil]x[/link]",
    "format": "%s %(x)s {0.__class__}",
}
BEYOND = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
hostile = pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)


def plant(opened: Session) -> None:
    """A run with a group for each text, which is its task, commands, answer, evidence and reasons."""
    rows.put_run(opened)
    rows.put_run(opened, "other")
    put_attempt(opened, "other/g0/e0/a0", reward=1.0)
    for number, text in enumerate(TEXTS.values()):
        task = TaskRef(taskset="shell", split=Split.TRAIN, task_id=text)
        said = [TurnRecord(turn=0, segment="s", action=text, finish_reason=text, engine=text, exit_code=0)]
        common = {"task": task, "why": text, "evidence": {text: text}, "turns": said, "host": text}
        for index in range(4):
            put_attempt(opened, f"r/g{number}/e{index}/a0", reward=None, stop_reason=StopReason.SANDBOX_LOST, **common)
        put_attempt(opened, f"r/g{number}/e4/a0", reward=1.0, **common)
        closed = {"eligible": False, "reason": text, "task_id": text, "members": []}
        queries.put_group(opened, run="r", result=rows.group(number).model_copy(update=closed))
        queries.put_task(opened, ref=task, kind=text, instruction=text)
        queries.put_quarantine(opened, run="r", task=task, why=text, since=1.0)


def test_in_sql_it_is_a_value_that_comes_back_as_it_was(database: Engine) -> None:
    before = set(inspect(database).get_table_names())
    with session(database) as opened:
        plant(opened)
    with session(database) as opened:
        for number, text in enumerate(TEXTS.values()):
            row = opened.get_one(Episode, f"r/g{number}/e4/a0")
            assert (row.why, row.evidence, row.host, row.task) == (text, {text: text}, text, f"shell/{text}")
            assert opened.get_one(Turn, (row.id, 0)).action == text
            assert opened.get_one(Group, f"r/g{number}").reason == text
            assert opened.exec(select(func.count()).where(Episode.task == f"shell/{text}")).one() == 5
            with pytest.raises(queries.NotFound):
                queries.run_row(opened, run=text)
        assert opened.exec(select(func.count()).where(col(Episode.run) == "other")).one() == 1
        assert {item.state for item in opened.exec(select(Run))} == {"running"}
    assert set(inspect(database).get_table_names()) == before


def test_on_the_page_it_is_words_and_runs_and_asks_for_nothing(database: Engine) -> None:
    with session(database) as opened:
        plant(opened)
        page = Page(written := render_html(build_report(opened, "r")))
    assert (page.scripts, page.handlers, page.asks, page.open) == (0, [], [], [])
    assert "{{ 7 * 7 }}" in written, "no template reads it"


def test_in_a_terminal_it_is_words_and_commands_nothing(home: Path, database: Engine) -> None:
    with session(database) as opened:
        plant(opened)
    shown = [ratchet("report", "r", "--check", code=1), ratchet("lineage", "r")]
    shown += [ratchet("lineage", "--episode", f"r/g{number}/e4/a0") for number in range(len(TEXTS))]
    for result in shown:
        for text in (result.stdout, result.stderr):
            found = BEYOND.search(text)
            assert found is None, repr(text[max(0, found.start() - 200) : found.end() + 60])
    assert "[boldred]loud" in "".join(shown[0].stdout.split()), "a terminal reads no markup of it"


@hostile
async def test_an_objects_key_is_made_of_our_own_ids_whatever_was_written(
    object_store: ObjectStore, model: Path, text: str
) -> None:
    tokenizer, engine = make_tokenizer(CHATML, eos="<|im_end|>"), FakeEngine()
    engine.label = "r:3"
    ids = [*tokenizer.encode(f"```bash\n{text}\n```", add_special_tokens=False), tokenizer.eos_token_id]
    engine.answer = lambda _: choice(ids, (engine.label, 0, len(ids)))

    class Hostile:
        name = text

        def ids(self, split: Split) -> list[str]:
            return [text]

        def load(self, task_id: str) -> Task:
            return Task(id=text, kind=text, instruction=text, setup=text, check=text)

    activities = GenerationActivities(pool_of(engine), object_store, lambda _: Hostile())
    asked = message(model, task=TaskRef(taskset=text, split=Split.TRAIN, task_id=text))
    await run(activities, asked)
    first = await run(activities, asked.model_copy(update={"observation": text}))
    assert first.segment == "runs/r/trajectories/g1/e0/a0/t0-1.json"
    assert [key for key, _ in object_store.keys("")] == [first.segment]


@hostile
def test_names_on_the_host_are_digests_of_it(tmp_path: Path, text: str) -> None:
    backend = DockerBackend("", tmp_path, 1)
    for name in (backend.id_of(text), backend.id_of("r/g0/e0/a0", text), key_of(text)):
        assert re.fullmatch(r"(ratchet-)?[0-9a-f]{20,40}", name)


@hostile
def test_a_task_id_opens_no_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "one.json").write_text('{"kind": "k", "instruction": "i", "setup": "true", "check": "true"}')
    with pytest.raises(InvalidConfig, match="has no task"):
        FolderTaskset(tmp_path / "tasks").load(text)
