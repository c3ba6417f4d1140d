"""A second set of a model's weights, made ready in slices between the engine's steps, and exchanged in milliseconds.

On CPU, vLLM packs each matrix for its kernel when it loads it, which takes most of a load; here that is done in a twin
of the module tree while the model goes on, and the exchange hands the twin's parameters and kernels to the model. It
costs a second set of weights in memory for that long. Runs inside vLLM's worker, on its own thread and below the worker
extension, so that nothing of the engine runs at the same time. Promises: until `exchange` the model is not touched; a
model, a device or a memory that it does not fit is refused with the reason, and is then loaded in place as ever.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator
from types import MethodType
from typing import Any

import psutil
import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.utils.cpu_resource_utils import get_cgroup_memory_limit, get_cgroup_memory_usage

KERNEL = "cpu_linear"
"""Attribute of a layer whose matrix is packed: its kernel, which holds the packed matrix."""
GROUP_BYTES = 8 << 20
"""Tensors that the model's own loader is given at once."""
ROOM = 1.5
"""Memory that a twin takes at most, in sizes of its weights: a tied embedding is packed twice."""
SPARE_BYTES = 256 << 20
WRAPPER = "online_process_loader"
DONE = object()


class Unfit(Exception):
    """There can be no twin; says why. Never leaves the worker extension."""


class Twin:
    """Of one model, for one set of weights. `key`: whose they are, as the caller says it."""

    def __init__(self, key: str, model: nn.Module, tensors: Iterator[tuple[str, Any]], size: int) -> None:
        _require_fit(model, size)
        self.key = key
        self.ready = False
        self.longest_s = 0.0
        """Of the calls of `more`."""
        self._tensors = tensors
        self._pairs: list[tuple[nn.Module, nn.Module]] = []
        self._twin = self._copied(model, {}, {})
        self._load: Any = getattr(self._twin, "load_weights")  # noqa: B009
        self._work = self._pieces()

    def more(self, seconds: float) -> bool:
        """Work on it for about so long; True once it is ready. Raises whatever the model's loader raises, and Unfit
        where the weights are not all of it."""
        began = now = time.monotonic()
        while now - began <= seconds and not self.ready:
            self.ready = next(self._work, DONE) is DONE
            now = time.monotonic()
        self.longest_s = max(self.longest_s, now - began)
        return self.ready

    def _pieces(self) -> Generator[None]:
        for _, layer in self._pairs:
            for parameter in layer._parameters.values():
                if parameter is not None:
                    # So that what nobody loads shows.
                    parameter.data.fill_(math.nan)
                    yield
        loaded = set[str]()
        while group := self._group():
            loaded |= self._load(group) or set()
            yield
        if missing := {name for name, _ in self._twin.named_parameters()} - loaded:
            raise Unfit(f"the weights lack {min(missing)}")
        for name, layer in [(name, layer) for name, layer in self._twin.named_modules() if layer._parameters]:
            if any(bool(item.isnan().any()) for item in layer._parameters.values() if item is not None):
                raise Unfit(f"{name} was not given all of its weights, or given some that are no numbers")
            yield
            method: Any = getattr(layer, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(layer)
                yield

    def exchange(self) -> None:
        """The model has the twin's weights from now on, and the twin nothing."""
        assert self.ready
        for ours, theirs in self._pairs:
            for name, parameter in theirs._parameters.items():
                ours._parameters[name] = _bound(parameter, theirs, ours)
            if KERNEL in vars(theirs):
                setattr(ours, KERNEL, getattr(theirs, KERNEL))
        self.drop()

    def drop(self) -> None:
        """Give its memory back now: layers and the loaders of their parameters hold each other."""
        self.ready = False
        self._work.close()
        for _, theirs in self._pairs:
            theirs._parameters.clear()
            vars(theirs).pop(KERNEL, None)

    def _group(self) -> list[tuple[str, Any]]:
        group, size = list[tuple[str, Any]](), 0
        while size < GROUP_BYTES and (item := next(self._tensors, None)) is not None:
            group.append(item)
            size += item[1].nbytes
        return group

    def _copied(self, ours: nn.Module, modules: dict[int, nn.Module], tensors: dict[int, nn.Parameter]) -> nn.Module:
        """The module with new parameters, as they were before any packing; everything else is shared. What is one in
        the model is one here."""
        if id(ours) in modules:
            return modules[id(ours)]
        theirs = modules[id(ours)] = object.__new__(type(ours))
        vars(theirs).update(vars(ours))
        theirs._parameters = {}
        theirs._buffers = dict(ours._buffers)
        theirs._modules = {}
        original = get_layerwise_info(ours).restore_metadata[0]
        for name, parameter in ours._parameters.items():
            if parameter is not None and id(parameter) not in tensors:
                tensors[id(parameter)] = _blank(original.get(name, parameter), theirs)
            theirs._parameters[name] = None if parameter is None else tensors[id(parameter)]
        for name, child in ours._modules.items():
            theirs._modules[name] = None if child is None else self._copied(child, modules, tensors)
        if theirs._parameters:
            self._pairs.append((ours, theirs))
        return theirs


def _blank(like: torch.Tensor, layer: nn.Module) -> Any:
    """A parameter of the layer, of that shape, dtype, class and attributes, and of no values yet."""
    blank: Any = torch.empty_strided(tuple(like.size()), tuple(like.stride()), dtype=like.dtype, device="cpu")
    blank.__class__ = like.__class__
    blank.__dict__ = like.__dict__.copy()
    # vLLM's own reload leaves its wrapper on, which waits for all tensors of the layer that it was made for.
    for key, value in blank.__dict__.items():
        while getattr(value, "__name__", "") == WRAPPER:
            value = value.__wrapped__
        blank.__dict__[key] = value
    return restore_layer_refs(blank, layer)


def _bound(parameter: Any, theirs: nn.Module, ours: nn.Module) -> Any:
    """The parameter with its loaders, which are methods of the layer that it was made for, those of another one."""
    for key, value in getattr(parameter, "__dict__", {}).items():
        if isinstance(value, MethodType) and value.__self__ is theirs:
            parameter.__dict__[key] = MethodType(value.__func__, ours)
    return parameter


def _require_fit(model: nn.Module, size: int) -> None:
    """Raises Unfit. Only layers whose weights are known to be in their parameters and in KERNEL, and nowhere else."""
    for name, layer in model.named_modules():
        kind, method = type(layer).__name__, getattr(layer, "quant_method", None)
        if hasattr(layer, "process_weights_after_loading") and type(layer) is not Attention:
            raise Unfit(f"{name} is of {kind}, which derives more from its weights")
        if isinstance(layer, LinearBase | VocabParallelEmbedding):
            if type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
                raise Unfit(f"{name} is quantized by {type(method).__name__}")
        elif layer._parameters and not kind.endswith("Norm"):
            raise Unfit(f"{name} is of {kind}, whose weights may be kept elsewhere too")
        elif method is not None:
            raise Unfit(f"{name} is of {kind}, which {type(method).__name__} processes")
        if layer._parameters and layer._buffers:
            raise Unfit(f"{name} has buffers beside its weights")
        if any(item is not None and item.device.type != "cpu" for item in layer._parameters.values()):
            raise Unfit(f"{name} is on a device, where nothing is packed")
    left, needed = _memory_left(), int(ROOM * size) + SPARE_BYTES
    if needed > left:
        raise Unfit(f"a second set of weights needs {needed >> 20} MiB of memory and {left >> 20} are left")


def _memory_left() -> int:
    """Bytes that this process may still take."""
    left = int(psutil.virtual_memory().available)
    limit, used = get_cgroup_memory_limit(), get_cgroup_memory_usage()
    return left if limit is None or used is None else min(left, limit - used)
