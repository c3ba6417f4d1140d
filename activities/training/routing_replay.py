"""Mixture-of-experts policies: the trainer's forward takes the experts that the engine took.

A router's choice of experts is a jump: scores that differ in the last bit can send a token through other experts, and
its log-probability differs by far more than any rounding. So the engine records which experts each token went through,
and here the trainer's routers choose those again; what the chosen experts count, and every gradient, stay the trainer's
own. (Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers",
arXiv:2510.11370.)

Routers are the modules of transformers that take the `top_k` largest of `num_experts` scores by one torch.topk, which
is what is replaced. Pure torch; called by the trainer's engine.

Shapes: B rows, T columns, L layers of the model (dense ones too), K experts per token. UNKNOWN_EXPERT leaves the
choice to the router.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from workflows.contracts import UNKNOWN_EXPERT
from workflows.errors import TrainerError

_LAYER = re.compile(r"\.layers\.(\d+)\.")


class RoutingReplay:
    """The routers of one model, `layers` of them; 0 for a model without experts."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._experts_BTLK: torch.Tensor | None = None
        self.layers = 0
        for name, module in model.named_modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                self._wrap(module, int(_LAYER.findall(f".{name}")[-1]))
                self.layers += 1

    def take(self, experts_BTLK: torch.Tensor | None) -> None:
        """Forward passes from here on, and what a backward pass recomputes of them, choose these experts; None: those
        that the routers choose themselves."""
        self._experts_BTLK = experts_BTLK

    def _wrap(self, router: Any, layer: int) -> None:
        own: Callable[..., Any] = router.forward

        def forward(*arguments: Any, **named: Any) -> Any:
            if self._experts_BTLK is None:
                return own(*arguments, **named)
            with _Chosen(self._experts_BTLK[:, :, layer].flatten(0, 1)) as chosen:
                found = own(*arguments, **named)
            if chosen.replaced != 1:
                raise TrainerError(
                    f"{type(router).__name__} chooses its experts in a way that can't be replayed: set"
                    " training.replay_routing to false",
                    retryable=False,
                )
            return found

        router.forward = forward


class _Chosen(TorchFunctionMode):
    """`torch.topk` of as many as are given takes those, where they are known."""

    def __init__(self, experts_NK: torch.Tensor) -> None:
        super().__init__()
        self._experts_NK = experts_NK
        self.replaced = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or found.indices.shape != self._experts_NK.shape:
            return found
        self.replaced += 1
        given_NK = self._experts_NK.to(found.indices)
        indices_NK = torch.where(given_NK != UNKNOWN_EXPERT, given_NK, found.indices)
        return torch.return_types.topk((args[0].gather(-1, indices_NK), indices_NK))
