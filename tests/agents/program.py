"""An agent program on the standard library alone: `program.py ROUNDS [COMMAND]` asks the policy, runs COMMAND in the
sandbox after each answer, and tells the policy what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request

ASKED = {"role": "user", "content": os.environ["RATCHET_INSTRUCTION"]}


def ask(messages: list[dict[str, str]]) -> dict[str, str]:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps({"model": os.environ["RATCHET_MODEL"], "messages": messages}).encode(),
        headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as answer:
        said: dict[str, str] = json.load(answer)["choices"][0]["message"]
    return said


def main(rounds: int, command: str) -> None:
    messages = [ASKED]
    for _ in range(rounds):
        messages.append(ask(messages))
        if command:
            ran = subprocess.run(["sandbox", command], capture_output=True, text=True, check=False)
            messages.append({"role": "user", "content": f"{ran.stdout}(exit {ran.returncode})"})
        else:
            messages.append({"role": "user", "content": "Go on."})


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
