"""What each harness says and reads, and that what trains is what the engine saw, for each family of templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.generation.activities import GenerationActivities
from activities.generation.harnesses import BASH, TOOLS_PROMPT, Harness, ToolsHarness, open_harness
from activities.generation.tool_calls import CallSyntax
from activities.generation.transcript import Messages, Template
from storage.objects import ObjectStore
from tasksets.base import Task
from tests.generation.fakes import FakeEngine, choice
from tests.generation.policies import (
    CALL_TAGS,
    CHATML,
    HERMES,
    LLAMA3,
    LLAMA3_SPECIAL,
    REWRITING,
    make_tokenizer,
)
from tests.generation.test_generate import OneTask, message, stored
from tests.generation.test_routing import pool_of
from workflows.contracts import Action, ActionKind
from workflows.errors import InvalidConfig

HERMES_LS = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
LLAMA3_LS = '{"name": "bash", "parameters": {"command": "ls"}}'
THOUGHT = "<think>\nhm\n</think>\n\n"
CALL = {"type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
ASKED = [{"role": "system", "content": TOOLS_PROMPT}, {"role": "user", "content": "Count the cats."}]
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
SEEN = {"role": "tool", "name": "bash", "content": "cat1\ncat2"}

FAMILIES = {
    "chatml": (HERMES, "<|im_end|>", (), HERMES_LS),
    "llama3": (LLAMA3, "<|eot_id|>", LLAMA3_SPECIAL, LLAMA3_LS),
    "rewriting": (REWRITING, "<|im_end|>", (), THOUGHT + HERMES_LS),
}


class World:
    """One family: its tokenizer, and an engine whose next answer is `says`."""

    def __init__(self, family: str, folder: Path, store: ObjectStore) -> None:
        chat, eos, special, self.calls_ls = FAMILIES[family]
        self.tokenizer = make_tokenizer(chat, eos=eos, special=special, added=CALL_TAGS)
        self.model, self.store = folder / family, store
        self.tokenizer.save_pretrained(self.model)
        self.template = Template.load(str(self.model))
        self.engine = FakeEngine()
        self.engine.label = "r:3"
        self.activities = GenerationActivities(pool_of(self.engine), store, lambda _: OneTask())
        self.segments: list[str] = []

    async def turn(self, ids: list[int], observation: str | None = None, harness: str = "tools") -> Any:
        """The engine answers `ids`."""
        self.engine.answer = lambda _: choice(ids, (self.engine.label, 0, len(ids)))
        asked = message(
            self.model,
            turn=len(self.segments),
            segments=list(self.segments),
            observation=observation,
            harness=harness,
            sampling={"temperature": 1.0, "max_tokens": 400, "context_length": 4096},
        )
        out = await ActivityEnvironment().run(self.activities.generate, asked)
        self.segments.append(out.segment)
        return out

    def ids(self, text: str) -> list[int]:
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.template.end_of_turn]

    def rendered(self, messages: Messages) -> list[int]:
        return list(
            self.tokenizer.apply_chat_template(
                messages, tools=[BASH], tokenize=True, add_generation_prompt=True, return_dict=False
            )
        )

    def trained(self) -> list[int]:
        return [token for key in self.segments for token in stored(self.store, key).token_ids]


@pytest.fixture(params=list(FAMILIES))
def world(request: pytest.FixtureRequest, tmp_path: Path, object_store: ObjectStore) -> World:
    return World(request.param, tmp_path, object_store)


async def test_what_trains_is_what_the_engine_saw_and_made_over_three_turns(world: World) -> None:
    made = []
    for observation, text in ((None, world.calls_ls), ("cat1\ncat2", "hm"), ("Not understood", world.calls_ls)):
        made = world.ids(text)
        await world.turn(made, observation)
        # A malformed answer, the second, is answered by the user and not by a tool.
        assert world.trained() == world.engine.requests[-1]["token_ids"] + made


async def test_the_first_prompt_has_the_tools_as_the_template_renders_them(world: World) -> None:
    out = await world.turn(world.ids(world.calls_ls))
    assert world.engine.requests[0]["token_ids"] == world.rendered(ASKED)
    assert (out.action.kind, out.action.command) == (ActionKind.COMMAND, "ls")


@pytest.mark.parametrize("family", ["chatml", "llama3"])
async def test_turns_by_turns_the_ids_are_those_of_the_whole_conversation_rendered_at_once(
    family: str, tmp_path: Path, object_store: ObjectStore
) -> None:
    world = World(family, tmp_path, object_store)
    await world.turn(world.ids(world.calls_ls))
    await world.turn(world.ids("Answer: 2"), "cat1\ncat2")
    assert world.engine.requests[1]["token_ids"] == world.rendered([*ASKED, CALLED, SEEN])


async def test_a_template_that_rewrites_history_does_not_rewrite_what_was_sampled(
    tmp_path: Path, object_store: ObjectStore
) -> None:
    """The thought stays where it was sampled, though rendering the conversation would drop it."""
    world = World("rewriting", tmp_path, object_store)
    thought = world.ids(THOUGHT + "It is unclear.")
    first = await world.turn(world.ids(THOUGHT + "<tool_call>"))
    prompt, said = world.engine.requests[0]["token_ids"], world.ids(THOUGHT + "<tool_call>")
    await world.turn(thought, first.action.error)
    second = world.engine.requests[1]["token_ids"]
    assert second[: len(prompt) + len(said)] == prompt + said
    history = [*ASKED, {"role": "assistant", "content": THOUGHT + "<tool_call>"}]
    rewritten = world.rendered([*history, {"role": "user", "content": first.action.error}])
    assert rewritten[: len(prompt) + len(said)] != prompt + said, "the template does rewrite"
    # What follows the answer is the template's own, in both.
    after = second[len(prompt) + len(said) :]
    assert after and rewritten[-len(after) :] == after


async def test_sampled_ids_are_kept_where_their_text_has_other_ones(world: World) -> None:
    spelt = [world.tokenizer.convert_tokens_to_ids(letter) for letter in "cat"]
    assert world.tokenizer.encode("cat", add_special_tokens=False) != spelt
    await world.turn([*spelt, world.template.end_of_turn])
    await world.turn(world.ids("Answer: 2"), "Not understood")
    seen = world.engine.requests[1]["token_ids"]
    first = world.engine.requests[0]["token_ids"]
    assert seen[len(first) : len(first) + 3] == spelt


async def test_the_shell_agent_plays_the_same_on_all_families(world: World) -> None:
    await world.turn(made := world.ids("```bash\nls\n```"), harness="shell")
    out = await world.turn(made := world.ids("Answer: 2"), "cat1\ncat2", harness="shell")
    assert world.trained() == world.engine.requests[1]["token_ids"] + made
    assert (out.action.kind, out.action.answer) == (ActionKind.FINAL, "2")


def test_the_syntax_of_calls_is_what_the_template_shows(tmp_path: Path, object_store: ObjectStore) -> None:
    found = {family: World(family, tmp_path, object_store).template.call_syntax for family in FAMILIES}
    assert found == {
        "chatml": CallSyntax.HERMES,
        "llama3": CallSyntax.LLAMA3,
        "rewriting": CallSyntax.HERMES,
    }


def test_a_template_without_tools_is_refused_with_a_way_out() -> None:
    with pytest.raises(InvalidConfig, match="harness shell"):
        open_harness("tools", Template(make_tokenizer(CHATML, eos="<|im_end|>")))


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (HERMES_LS, ActionKind.COMMAND, "ls"),
        (THOUGHT + "I look." + HERMES_LS, ActionKind.COMMAND, "ls"),
        ("It is 3.", ActionKind.FINAL, "It is 3."),
        ("It is clear.\nAnswer: 3", ActionKind.FINAL, "3"),
        (THOUGHT + "3", ActionKind.FINAL, "3"),
        (THOUGHT, ActionKind.MALFORMED, "neither a call nor a result"),
        ("", ActionKind.MALFORMED, "neither a call nor a result"),
        (HERMES_LS + HERMES_LS, ActionKind.MALFORMED, "more than one call"),
        ("<tool_call>ls</tool_call>", ActionKind.MALFORMED, "not JSON"),
        (HERMES_LS.replace("bash", "python"), ActionKind.MALFORMED, "no tool 'python'"),
        (HERMES_LS.replace("command", "cmd"), ActionKind.MALFORMED, "no tool 'bash' with these"),
        (HERMES_LS.replace("ls", " "), ActionKind.MALFORMED, "empty"),
    ],
)
def test_the_tool_calling_agent_reads_one_action(text: str, kind: ActionKind, said: str) -> None:
    harness = ToolsHarness(Template(make_tokenizer(HERMES, eos="<|im_end|>", added=CALL_TAGS)))
    action = harness.read(text)
    assert action.kind is kind
    assert said in (action.command, action.answer) or said in action.error


class Loud:
    """A harness of somebody's own."""

    tools = ()

    def __init__(self, template: Template) -> None:
        self.stop = template.end_of_turn

    def begin(self, task: Task) -> Messages:
        return [{"role": "user", "content": task.instruction.upper()}]

    def read(self, text: str) -> Action:
        return Action(kind=ActionKind.COMMAND, command=text.lower())

    def observe(self, text: str, observation: str) -> Messages:
        return [{"role": "user", "content": observation.upper()}]


async def test_a_run_may_bring_a_harness_of_its_own(world: World) -> None:
    own: Harness = Loud(world.template)
    assert own.tools == ()
    out = await world.turn(world.ids("LS"), harness=f"{__name__}:Loud")
    await world.turn(world.ids("LS"), "cats", harness=f"{__name__}:Loud")
    assert out.action.command == "ls"
    assert "COUNT THE CATS." in world.tokenizer.decode(world.engine.requests[0]["token_ids"])
    assert "CATS" in world.tokenizer.decode(world.engine.requests[1]["token_ids"][-40:])


@pytest.mark.parametrize("name", ["nowhere.to.be.found:Harness", f"{__name__}:Nothing", "sys"])
def test_a_harness_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(InvalidConfig, match=r"rollout\.harness"):
        open_harness(name, Template(make_tokenizer(CHATML, eos="<|im_end|>")))
