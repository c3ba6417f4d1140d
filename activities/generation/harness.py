"""What the agent is told, and what its text asks for.

Owns the system prompt, the shape of the conversation and the action syntax. Promises: every text has exactly one
reading, and a text that has none or several comes back as MALFORMED with an error that the agent can act on. Called by
the generate activity, by the warm start of the demo's policy and by the tests; knows neither tokens nor engines.

An action is one of

- one fenced block, closed by a line that holds only the fence: a command::

    ```bash
    grep -c error /data/log
    ```

- one Hermes-style tool call: `<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>`;
- one line `Answer: ...` and neither of the two above: the agent is done.
"""

from __future__ import annotations

import json
import re

from activities.generation.tool_calls import MalformedCall, read_json, tagged_calls
from tasksets.base import Task
from workflows.contracts import Action, ActionKind, ActOutput

SYSTEM_PROMPT = (
    "You use a Linux shell. Reply with one command:\n```bash\nls\n```\nWhen done, reply with:\nAnswer: RESULT"
)

REMINDER = "Reply with one ```bash block, or with Answer:"

_LANGUAGES = ("bash", "sh")
_FENCE = re.compile(r"^[ \t]*```[ \t]*+(?P<language>\S*+)[ \t]*+$")
_CLOSING = re.compile(r"^[ \t]*```[ \t]*$")
_ANSWER = re.compile(r"^[ \t]*Answer:(.*)$", re.MULTILINE)
_SURROGATES = re.compile("[\ud800-\udfff]")
MOST_BYTES = 40 << 10
"""Of a command or an answer, as JSON: it goes in messages, which hold 64 KiB with what else is in them."""
ERROR_CHARS = 1000


def system_prompt() -> str:
    """The system message: short enough for a context of a few hundred tokens, longer than one block of the cache."""
    return SYSTEM_PROMPT


def initial_messages(task: Task) -> list[dict[str, str]]:
    """The conversation before the first generation, as OpenAI-style messages."""
    return [{"role": "system", "content": system_prompt()}, {"role": "user", "content": task.instruction}]


def observation_message(text: str) -> dict[str, str]:
    """What the agent sees of its last action. The role is `user`, which every chat template knows."""
    return {"role": "user", "content": text}


def format_observation(result: ActOutput) -> str:
    """The text of a command's result: its output, then how it ended where that was not exit 0."""
    return result.observation()


def parse_action(text: str) -> Action:
    """The one action that `text` asks for; MALFORMED, with the reminder in `error`, when it asks for none or several.

    `text` is the sampled turn without special tokens.
    """
    blocks, outside = _split_blocks(text)
    if blocks is None:
        return _malformed("the ``` block is not closed")
    try:
        calls, outside = tagged_calls(outside)
    except MalformedCall as error:
        return _malformed(str(error))
    answers = [answer.strip() for answer in _ANSWER.findall(outside)]
    if len(blocks) + len(calls) + len(answers) > 1:
        return _malformed("more than one action")
    if blocks:
        language, command = blocks[0]
        return _command(command) if language in _LANGUAGES else _malformed("the block does not begin with ```bash")
    if calls:
        return _tool_call(calls[0])
    if answers:
        answer = _unquote(answers[0])
        return Action(kind=ActionKind.FINAL, answer=answer) if answer else _malformed("the answer is empty")
    return _malformed("no action")


def carried(action: Action) -> Action:
    """The action of any harness as messages can carry it: halves of characters, which JSON can name and no text can
    hold, are replaced; a command or an answer that is too long is MALFORMED."""
    command, answer, error = (_SURROGATES.sub("\ufffd", said) for said in (action.command, action.answer, action.error))
    for what, said in (("command", command), ("answer", answer)):
        if len(json.dumps(said, ensure_ascii=False).encode()) > MOST_BYTES:
            why = f"Not understood: the {what} has more than {MOST_BYTES >> 10} KiB. Do it in smaller parts."
            return Action(kind=ActionKind.MALFORMED, error=why)
    return Action(kind=action.kind, command=command, answer=answer, error=error[:ERROR_CHARS])


def _split_blocks(text: str) -> tuple[list[tuple[str, str]] | None, str]:
    """The fenced blocks as (language, content) and the text outside them; None for an unclosed block."""
    blocks: list[tuple[str, str]] = []
    outside: list[str] = []
    language: str | None = None
    content: list[str] = []
    for line in text.split("\n"):
        line = line.removesuffix("\r")
        if language is None:
            opening = _FENCE.match(line)
            if opening is None:
                outside.append(line)
            else:
                language, content = opening["language"], []
        elif _CLOSING.match(line):
            blocks.append((language, "\n".join(content)))
            language = None
        else:
            content.append(line)
    return (blocks if language is None else None), "\n".join(outside)


def _tool_call(body: str) -> Action:
    try:
        call = read_json(body)
    except ValueError:
        return _malformed("the <tool_call> is not JSON")
    arguments = call.get("arguments") if isinstance(call, dict) else None
    command = arguments.get("command") if isinstance(arguments, dict) else None
    if not isinstance(command, str) or call.get("name") != "bash":
        return _malformed('the <tool_call> must be {"name": "bash", "arguments": {"command": "..."}}')
    return _command(command)


def _command(command: str) -> Action:
    if not command.strip():
        return _malformed("the command is empty")
    if "\0" in command:
        return _malformed("the command holds a NUL byte")
    return Action(kind=ActionKind.COMMAND, command=command.strip("\n"))


def _unquote(answer: str) -> str:
    """The answer without a pair of quotes or backticks around it."""
    quoted = len(answer) >= 2 and answer[0] == answer[-1] and answer[0] in "`'\""
    return answer[1:-1].strip() if quoted else answer


def _malformed(why: str) -> Action:
    return Action(kind=ActionKind.MALFORMED, error=f"Not understood: {why}. {REMINDER}")
