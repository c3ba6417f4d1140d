"""`python -m bench.stub_engine --port P --model FOLDER --label RUN:0`: an engine whose generation takes a given time.

Speaks what activities/generation/engine.py asks of vLLM, so that everything on our side of the wire is the real thing,
and generation time is what a benchmark holds constant. Each episode gets the commands of `COMMANDS`, one per turn, and
then an answer. `POST /bench/seconds` with `{"seconds": S}` sets the time. Called by durability.py.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from aiohttp import web

from activities.generation.transcript import Template

COMMANDS = ("ls /data", "cat /data/*", "ls -l")
ANSWER = "Answer: done"
TURNS = len(COMMANDS) + 1


class StubEngine:
    """`label` is the weight version that its tokens carry."""

    def __init__(self, template: Template, label: str, seconds: float = 0.0) -> None:
        self._label = label
        self._seconds = seconds
        self._end = template.end_of_turn
        texts = [*(f"```bash\n{command}\n```" for command in COMMANDS), ANSWER]
        self._answers = [[*template.encode(text), template.end_of_turn] for text in texts]
        # The first prompt ends the turns of system and user; each later one two more.
        self._first = 2

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/weight_info", self._info)
        app.router.add_get("/health", self._info)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/bench/seconds", self._set)
        return app

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._label})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text="vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n")

    async def _set(self, request: web.Request) -> web.Response:
        self._seconds = float((await request.json())["seconds"])
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        await asyncio.sleep(self._seconds)
        return web.json_response(self.answer(body["token_ids"]))

    def answer(self, prompt: list[int]) -> dict[str, Any]:
        """vLLM's answer to the prompt: which turn it is, is in the number of turns that it holds."""
        turn = min((prompt.count(self._end) - self._first) // 2, TURNS - 1)
        tokens = self._answers[turn]
        return {
            "choices": [
                {
                    "token_ids": tokens,
                    "finish_reason": "stop",
                    "logprobs": {"content": [{"logprob": -0.1} for _ in tokens]},
                    "weight_versions": [{"version": self._label, "start": 0, "end": len(tokens)}],
                }
            ],
            "usage": {"prompt_tokens_details": {"cached_tokens": 0}},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True, help="folder of the tokenizer")
    parser.add_argument("--label", required=True)
    options = parser.parse_args()
    engine = StubEngine(Template.load(options.model), options.label)
    web.run_app(engine.application(), host="127.0.0.1", port=options.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
