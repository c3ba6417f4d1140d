"""The second copies of weights that vLLM keeps on CPU and does not renew when the weights change.

Runs inside vLLM's process; called after every load, by the worker extension and the staged transfer.
"""

from __future__ import annotations

from typing import Any


def renew_copies(model: Any) -> None:
    """Bring every copy that this model keeps up to its weights."""
    _repack_tied_head(model)
    _repack_experts(model)


def _repack_tied_head(model: Any) -> None:
    """The head keeps a packed copy of the tied embedding, which vLLM's reload does not renew."""
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def _repack_experts(model: Any) -> None:
    """On CPU a layer's experts are packed for their kernel once, when the engine starts: after vLLM's reload they lie
    there unpacked, and the kernel reads them as if they were not."""
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts: Any = getattr(kernel, "fused_experts", None)
        if type(experts).__module__.endswith(".cpu_moe") and hasattr(module, "w13_weight"):
            experts.process_weights_after_loading(module)
