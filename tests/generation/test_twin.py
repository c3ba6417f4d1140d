"""A second set of weights beside the first, on layers that need no engine; with one in test_vllm.py."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from activities.generation import twin as twins
from activities.generation.twin import KERNEL, Twin, Unfit

pytestmark = pytest.mark.engine


class ToyNorm(nn.Module):
    """Its parameter is loaded by a method of its own, as those of vLLM's layers are."""

    def __init__(self, rows: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows), requires_grad=False)
        self.weight.weight_loader = self.weight_loader  # type: ignore[assignment]

    def weight_loader(self, parameter: nn.Parameter, loaded: torch.Tensor) -> None:
        parameter.data.copy_(loaded)


class Toy(nn.Module):
    """Two norms, of which the last is the first again, and some memory that is no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ToyNorm(), ToyNorm()
        self.tied = self.first
        self.cache = [1, 2, 3]
        self.taken: list[int] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        named = list(weights)
        for name, tensor in named:
            parameter: Any = self.get_parameter(name)
            parameter.weight_loader(parameter, tensor)
        return {name for name, _ in named}


def weights(value: float, *names: str) -> list[tuple[str, torch.Tensor]]:
    return [(f"{name}.weight", torch.full((3,), value)) for name in names or ("first", "second")]


def test_the_model_is_as_it_was_until_the_exchange_and_then_has_all_of_it_at_once() -> None:
    model = Toy()
    before = model.first.weight
    twin = Twin("a", model, iter(weights(1.0)), 24)
    while not twin.more(0):
        assert model.first.weight is before and not before.any()
    twin.exchange()
    assert [*model.first.weight, *model.second.weight] == [1.0] * 6
    assert model.tied.weight is model.first.weight and model.cache == [1, 2, 3]


def test_a_second_exchange_frees_what_the_first_one_brought_without_the_collector() -> None:
    model, freed = Toy(), list[weakref.ref[Any]]()
    gc.disable()
    try:
        for value in (1.0, 2.0, 3.0):
            twin = Twin(str(value), model, iter(weights(value)), 24)
            freed += [weakref.ref(model.second.weight), weakref.ref(twin)]
            assert twin.more(10)
            twin.exchange()
            del twin
        assert [ref() for ref in freed] == [None] * 6
        assert model.second.weight[0] == 3
        loader: Any = model.second.weight
        assert loader.weight_loader.__self__ is model.second, "not the twin's, which it would keep"
        twin = Twin("dropped", model, iter(weights(4.0)), 24)
        twin.more(0)
        layers = [weakref.ref(theirs) for _, theirs in twin._pairs]
        twin.drop()
        del twin
        assert [ref() for ref in layers] == [None] * 2
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (weights(1.0, "first"), "the weights lack second.weight"),
        ([*weights(1.0, "first"), ("second.weight", torch.tensor([1.0, math.nan, 1.0]))], "second was not given all"),
    ],
    ids=["one_is_missing", "one_is_no_number"],
)
def test_weights_that_are_not_whole_are_no_twin(given: list[tuple[str, torch.Tensor]], why: str) -> None:
    model = Toy()
    twin = Twin("a", model, iter(given), 24)
    with pytest.raises(Unfit, match=why):
        twin.more(10)
    assert not model.first.weight.any()


def _with(name: str, value: Any) -> Toy:
    model = Toy()
    setattr(model.second, name, value)
    return model


class ToyExperts(ToyNorm):
    """No norm by its name."""


def _of(layer: nn.Module) -> Toy:
    model = Toy()
    model.second = layer  # type: ignore[assignment]
    return model


def _deriving() -> Toy:
    return _with("process_weights_after_loading", print)


def _buffered() -> Toy:
    model = Toy()
    model.second.register_buffer("scale", torch.ones(1))
    return model


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (_of(ToyExperts()), "second is of ToyExperts, whose weights may be kept elsewhere too"),
        (_with("quant_method", object()), "second is of ToyNorm, which object processes"),
        (_deriving(), "second is of ToyNorm, which derives more from its weights"),
        (_buffered(), "second has buffers beside its weights"),
        (Toy().to("meta"), "first is on a device, where nothing is packed"),
    ],
    ids=["unknown_kind", "quantized", "deriving", "buffers", "device"],
)
def test_a_model_whose_weights_may_be_elsewhere_too_is_refused_with_the_layer(model: Toy, why: str) -> None:
    with pytest.raises(Unfit, match=why):
        Twin("a", model, iter(weights(1.0)), 24)


def test_a_second_set_that_memory_is_too_short_for_is_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(twins, "_memory_left", lambda: 300 << 20)
    with pytest.raises(Unfit, match="a second set of weights needs 406 MiB of memory and 300 are left"):
        Twin("a", Toy(), iter(weights(1.0)), 100 << 20)


def test_a_kernel_of_the_twin_is_the_models_after_the_exchange() -> None:
    model = Toy()
    model.second.__dict__[KERNEL] = "packed once"
    twin = Twin("a", model, iter(weights(1.0)), 24)
    assert twin.more(10)
    theirs = next(theirs for ours, theirs in twin._pairs if ours is model.second)
    theirs.__dict__[KERNEL] = "packed again"
    twin.exchange()
    assert getattr(model.second, KERNEL) == "packed again"
