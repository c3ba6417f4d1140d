"""Inside an engine on CPU: which experts each token of each request went through.

On GPUs vLLM returns that with the answer (`--enable-return-routed-experts`), by a model runner that its CPU build does
not have. Here the routers' own hook is bound, and what they chose in a step is laid beside the requests of that step,
until it is asked for. Tokens that came from the prefix cache went through nothing: theirs is UNKNOWN_EXPERT. Called by
the worker extension alone; knows vLLM's CPU worker, and imports nothing of it.
"""

from __future__ import annotations

import base64
import io
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workflows.contracts import UNKNOWN_EXPERT

MOST_REQUESTS = 1024
"""Of which nobody has asked yet; the oldest go first."""


class RoutingCapture:
    """Bound to the model runner of a worker for the rest of its life. Raises ValueError for a model without routers."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._step: dict[int, NDArray[np.int16]] = {}
        self._parts: OrderedDict[str, list[tuple[int, NDArray[np.int16]]]] = OrderedDict()
        """By request as its client knows it: (index of the first token, experts [tokens, layers, K])."""
        routed = [module for module in runner.get_model().modules() if hasattr(module, "layer_id") and _router(module)]
        if not routed:
            raise ValueError("the model has no router")
        self._layers = runner.model_config.get_total_num_hidden_layers()
        for module in routed:
            _router(module).set_capture_fn(partial(self._chosen, module.layer_id))
        self._execute = runner.execute_model
        runner.execute_model = self._execute_model

    def taken(self, request_id: str, start: int, stop: int) -> str:
        """base64 of a .npy [stop - start, layers, K], and nothing is kept of the request; empty for an unknown one."""
        parts = self._parts.pop(request_id, None)
        if not parts:
            return ""
        whole = np.full((stop, *parts[0][1].shape[1:]), UNKNOWN_EXPERT, np.int16)
        for first, experts in parts:
            whole[first : first + len(experts)] = experts[: max(0, stop - first)]
        buffer = io.BytesIO()
        np.save(buffer, whole[start:])
        return base64.b64encode(buffer.getvalue()).decode()

    def _chosen(self, layer: int, experts_NK: Any) -> None:
        self._step[layer] = experts_NK.numpy().astype(np.int16)

    def _execute_model(self, step: Any, *arguments: Any, **named: Any) -> Any:
        self._step.clear()
        found = self._execute(step, *arguments, **named)
        if self._step:
            self._keep(step)
        return found

    def _keep(self, step: Any) -> None:
        first = dict(_first_tokens(step))
        some = next(iter(self._step.values()))
        experts_NLK = np.full((len(some), self._layers, some.shape[1]), UNKNOWN_EXPERT, np.int16)
        for layer, experts_NK in self._step.items():
            experts_NLK[:, layer] = experts_NK
        begin = 0
        for name in self._runner.input_batch.req_ids:
            if not (count := step.num_scheduled_tokens.get(name, 0)):
                continue
            # vLLM adds a random ending to the name that the client gets.
            parts = self._parts.setdefault(name.rpartition("-")[0], [])
            parts.append((first[name], experts_NLK[begin : begin + count]))
            begin += count
        while len(self._parts) > MOST_REQUESTS:
            self._parts.popitem(last=False)


def _router(module: Any) -> Any:
    router = getattr(module, "router", None)
    return router if hasattr(router, "set_capture_fn") else None


def _first_tokens(step: Any) -> Iterator[tuple[str, int]]:
    """By request, how many of its tokens were through before the step."""
    for request in step.scheduled_new_reqs:
        yield request.req_id, request.num_computed_tokens
    yield from zip(step.scheduled_cached_reqs.req_ids, step.scheduled_cached_reqs.num_computed_tokens, strict=True)
