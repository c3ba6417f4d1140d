"""An agent as people write them, on OpenAI's own client. Of Ratchet it knows `sandbox` and three variables."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any

import openai

PROMPT = "You use a Linux shell. Reply with one command:\n```bash\nls\n```\nWhen done, reply with:\nAnswer: RESULT"
BLOCK = re.compile(r"```bash\n(.*?)\n```", re.DOTALL)
SPENT = (openai.PermissionDeniedError, openai.BadRequestError)


def seen(text: str) -> str:
    """What the policy sees of what it asked for."""
    block = BLOCK.search(text)
    if block is None:
        return "Not understood: no action. Reply with one ```bash block, or with Answer:"
    ran = subprocess.run(["sandbox", block[1]], capture_output=True, text=True, check=False)
    ending = f"(exit {ran.returncode})" if ran.returncode else ""
    return "\n".join(part for part in (ran.stdout.rstrip("\n"), ending) if part) or "(no output)"


def main() -> None:
    messages: list[Any] = [
        {"role": "system", "content": PROMPT},
        {"role": "user", "content": os.environ["RATCHET_INSTRUCTION"]},
    ]
    with openai.OpenAI() as client:
        while True:
            try:
                answer = client.chat.completions.create(model=os.environ["RATCHET_MODEL"], messages=messages)
            except SPENT as error:
                print(error)
                return
            text = answer.choices[0].message.content or ""
            if "Answer: " in text:
                return
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": seen(text)}]


if __name__ == "__main__":
    main()
