"""Checksums of tensors that both ends of a load can afford: written into the manifest by `publish`, computed again in
the engine's process of what its model was given and of what it holds.

A tensor's checksum is the sum of its bytes, read as little-endian words of 64 bits with zeros after the last, modulo
2^64. It goes through memory once, at its speed; a changed bit or byte always shows; and since it adds up, a parameter
that an engine fuses from several tensors (q, k and v; gate and up) has the sum of theirs. It is no guard against those
who mean harm, nor against another order of the elements: the files' sha256 and the canary are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from activities.publication.tensors import mapped, tensors_in

RECEIVED = "_ratchet_received"
WORD = 8
WIDTHS = {"torch.float64": 8, "torch.float32": 4, "torch.float16": 2, "torch.bfloat16": 2}


def checksum(tensor: Any) -> str:
    """Of a torch tensor, on whatever device: 16 hexadecimal digits."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % WORD:
        flat = flat.clone()
    octets = flat.view(torch.uint8)
    whole = octets.numel() // WORD * WORD
    total = int(octets[:whole].view(torch.int64).sum()) if whole else 0
    return _hexadecimal(total + int.from_bytes(bytes(octets[whole:].tolist()), "little"))


def added(checksums: Iterable[str]) -> str:
    """Of several tensors one after the other, each of which but the last is of whole words."""
    return _hexadecimal(sum(int(item, 16) for item in checksums))


def checksums_of_file(path: Path) -> dict[str, str]:
    """By name, of each tensor of a safetensors file."""
    return {name: checksum(tensor) for name, tensor in tensors_in(mapped(path))}


def sources(
    parameter: str, size: int, dtype: str, given: Mapping[str, tuple[int, str]], packed: Mapping[str, Sequence[str]]
) -> list[str]:
    """The tensors whose bits a parameter of `size` elements holds, with nothing else but zeros; empty where that can't
    be said: it is cut between devices, cast, or of an unknown kind.

    `given`: elements and dtype of each tensor by name; `packed`: by name of a fused module those that it is made of, as
    vLLM's models have it."""
    head, _, kind = parameter.rpartition(".")
    path, _, module = head.rpartition(".")
    names = [".".join(filter(None, (path, part, kind))) for part in packed.get(module, [module])]
    if dtype not in WIDTHS or any(name not in given or given[name][1] != dtype for name in names):
        return []
    sizes = [given[name][0] for name in names]
    whole = all(count * WIDTHS[dtype] % WORD == 0 for count in sizes[:-1])
    return names if whole and sum(sizes) <= size else []


def _hexadecimal(total: int) -> str:
    return f"{total % 2**64:016x}"


class Received:
    """What a model was given in one load. The tensors stay in memory until their checksums are made."""

    def __init__(self) -> None:
        self.given: dict[str, tuple[int, str]] = {}
        """Elements and dtype by name."""
        self._tensors: dict[str, Any] = {}
        self._checksums: dict[str, str] = {}
        self._thread = threading.Thread(target=self._make, name="checksums", daemon=True)

    def passing(self, tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """`tensors`, each noted as it goes by."""
        for name, tensor in tensors:
            self._tensors[name] = tensor
            self.given[name] = (tensor.numel(), str(tensor.dtype))
            yield name, tensor

    def loaded(self) -> None:
        """All have gone by: begin with the checksums, while the engine goes on. Once is enough."""
        if self._thread.ident is None:
            self._thread.start()

    def checksums(self) -> dict[str, str]:
        """By name, of the memory that the model was given; waits until they are made."""
        self._thread.join()
        return self._checksums

    def _make(self) -> None:
        for name in list(self._tensors):
            self._checksums[name] = checksum(self._tensors.pop(name))


def remember(model: Any, received: Received) -> None:
    """The model has taken all of `received`."""
    received.loaded()
    setattr(model, RECEIVED, received)


def checksums_of_model(model: Any) -> tuple[dict[str, str], list[tuple[str, list[str]]]]:
    """(checksum of each tensor that the model was given in its last load, checksum of each parameter that holds the
    bits of some of them, with their names). A model that was given nothing yet has none."""
    received: Received | None = getattr(model, RECEIVED, None)
    if received is None:
        return {}, []
    packed = getattr(model, "packed_modules_mapping", {})
    held = []
    for name, parameter in model.named_parameters():
        if names := sources(name, parameter.numel(), str(parameter.dtype), received.given, packed):
            held.append((checksum(parameter), names))
    return received.checksums(), held
