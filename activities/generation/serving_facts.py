"""How an engine serves, by its own account: what of its configuration changes the tokens that come out.

Runs inside vLLM's worker, which has the configuration as vLLM resolved it (`auto` is gone) and the kernels as they were
chosen; called by name through the worker extension. Values are strings, numbers and booleans, one level deep, so that
two engines can be compared field by field.
"""

from __future__ import annotations

import os
from typing import Any

FLAGS = (
    "VLLM_USE_",
    "VLLM_ROCM_USE_",
    "VLLM_CPU_ATTN",
    "VLLM_CPU_INT4",
    "VLLM_CPU_SGL",
    "VLLM_FLASH",
    "VLLM_MARLIN_USE_",
    "VLLM_MOE_USE_",
    "VLLM_DISABLED_KERNELS",
    "VLLM_BLOCKSCALE",
    "VLLM_ALLREDUCE_USE_",
)
"""Beginnings of the names of environment variables by which vLLM's kernels are chosen. None of them holds a secret."""


def serving_facts(model_runner: Any) -> dict[str, str | int | float | bool]:
    """The engine's part of a serving fingerprint. `model_runner` is vLLM's."""
    import torch
    import vllm
    from vllm import envs

    config = model_runner.vllm_config
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    scheduler, compilation, speculative = config.scheduler_config, config.compilation_config, config.speculative_config
    dtype = _plain(model.dtype)
    facts: dict[str, Any] = {
        "engine": "vllm",
        "engine_version": vllm.__version__,
        "torch_version": torch.__version__,
        "device": _device(torch),
        "dtype": dtype,
        "quantization": str(model.quantization or "none"),
        "kv_cache_dtype": dtype if cache.cache_dtype == "auto" else str(cache.cache_dtype),
        "attention_backend": _attention(model_runner),
        "layers": _kernels(model_runner.get_model()),
        "kernel_flags": " ".join(f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(FLAGS)),
        "batch_invariant": bool(envs.VLLM_BATCH_INVARIANT),
        "enforce_eager": bool(model.enforce_eager),
        "compilation": getattr(compilation.mode, "name", str(compilation.mode)).lower(),
        "cudagraphs": getattr(compilation.cudagraph_mode, "name", str(compilation.cudagraph_mode)).lower(),
        "tensor_parallel": int(parallel.tensor_parallel_size),
        "pipeline_parallel": int(parallel.pipeline_parallel_size),
        "data_parallel": int(parallel.data_parallel_size),
        "max_model_len": int(model.max_model_len),
        "max_num_seqs": int(scheduler.max_num_seqs),
        "max_num_batched_tokens": int(scheduler.max_num_batched_tokens),
        "chunked_prefill": bool(scheduler.enable_chunked_prefill),
        "prefix_caching": bool(cache.enable_prefix_caching),
        "block_size": int(cache.block_size),
        "logprobs_mode": str(model.logprobs_mode),
        "speculative_decoding": str(speculative.method) if speculative is not None else "none",
        "lora": config.lora_config is not None,
    }
    return {name: _exact(value) for name, value in facts.items()}


def _exact(value: Any) -> str | int | float | bool:
    """Of a built-in type itself: vLLM's core can't send a subclass, as torch's own version is, and its sending thread
    ends with the attempt."""
    if isinstance(value, bool | int | float):
        return value if type(value) in (bool, int, float) else float(value)
    return str(value)


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _device(torch: Any) -> str:
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"cpu, {torch.backends.cpu.get_cpu_capability()}"


def _attention(model_runner: Any) -> str:
    """The backends that the attention layers were given, as `FLASH_ATTN`."""
    groups = [group for kind in getattr(model_runner, "attn_groups", []) for group in kind]
    names = {group.backend.get_name() for group in groups if hasattr(group, "backend")}
    if not names:
        layers = model_runner.get_model().modules()
        names = {layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")}
    return ", ".join(sorted(names)) or "none"


def _kernels(model: Any) -> str:
    """The classes by which the layers compute, as `UnquantizedLinearMethod`: a quantized layer has another."""
    methods = (getattr(layer, "quant_method", None) for layer in model.modules())
    return ", ".join(sorted({type(method).__name__ for method in methods if method is not None}))
