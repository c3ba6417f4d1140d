"""An external router as the client sees it: one address for all engines, which places the requests itself.

It must pass vLLM's `/inference/v1/generate` through in both directions, so that ids, log-probabilities and weight
versions are the engine's own; what it leaves out is named in a final error. Only generations go through it: labels,
pressure and weight loads are the engines' own business.
"""

from __future__ import annotations

from typing import Any

import httpx

from activities.generation.engine import GENERATE_PATH, GENERATE_S, EngineClient
from workflows.contracts import EngineInfo
from workflows.errors import EngineError

NAME = "router"
"""In lineage, where an engine's name would stand: which of them it was, only the router knows."""
WITHOUT_ROUTE = (404, 405, 501)
NEEDED = ("token_ids", "logprobs", "weight_versions")


class RouterClient(EngineClient):
    """The router at `url`."""

    def __init__(self, url: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        super().__init__(EngineInfo(name=NAME, host="", url=url), transport=transport)

    async def _generate(
        self, body: dict[str, Any], *, read_s: float = GENERATE_S, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Raises EngineError, final, for what the router does not pass through."""
        answer = await super()._generate(body, read_s=read_s, headers=headers)
        choices = answer.get("choices") if isinstance(answer, dict) else None
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        if missing := [name for name in NEEDED if choice.get(name) is None]:
            raise self._unfit(f"its answers come without {', '.join(missing)}")
        return answer

    async def _works(self) -> bool:
        """Which engine is silent behind it, only the router knows."""
        return True

    def _refused(self, path: str, response: httpx.Response) -> EngineError:
        refused = super()._refused(path, response)
        return self._unfit(str(refused)) if response.status_code in WITHOUT_ROUTE else refused

    def _unfit(self, why: str) -> EngineError:
        message = f"the router at {self.info.url} does not pass {GENERATE_PATH} through: {why}"
        return EngineError(message, retryable=False)
