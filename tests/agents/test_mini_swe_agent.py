"""mini-swe-agent as it is published, from its first turn to its submission."""

from __future__ import annotations

from pathlib import Path

import pytest

from activities.agents.endpoint import AgentEndpoint
from tests.agents.mini import MINI_ENV, mini, mini_command
from tests.agents.test_run_agent import run
from tests.agents.worlds import AgentWorld
from workflows.contracts import ActOutput, StopReason

__all__ = ["mini"]

pytestmark = pytest.mark.machines

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def call(command: str) -> str:
    return f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{command}"}}}}\n</tool_call>'


async def test_its_turns_are_one_conversation_of_the_engines_ids_and_its_commands_run_in_the_sandbox(
    world: AgentWorld, endpoint: AgentEndpoint, mini: Path
) -> None:
    world.says = ["I look." + call("ls"), call("wc -l log"), call(f"echo {SUBMIT}")]
    world.sandbox.says = lambda command: ActOutput(exit_code=0, output=f"{SUBMIT if SUBMIT in command else 3}\n")
    out = await run(world, endpoint, world.message(mini_command(mini), env=MINI_ENV))
    assert out.stop_reason is StopReason.FINISHED, out.why
    assert len(out.turns) == 3
    (ids,) = world.branches(out.turns)
    text = world.tokenizer.decode(ids)
    assert text.count("<tool_response>") == 2 and "Count the cats." in text
    commands = [command for command in world.sandbox.commands if command.startswith("cd /work")]
    assert len(commands) == 3 and "sh -c ls" in commands[0]
