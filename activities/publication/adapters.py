"""Weights that are made from a model and an adapter on it: the same bits on every machine. Called by the trainer, which
serves what it makes, by `publish`, and on engine hosts.

W' = W + scale B A, and a matrix product is rounded otherwise on every machine. So that of a narrow W is taken in
float64, of which W' keeps one bit in six: it differs in one of 10^13 elements. That of another W is computed an element
at a time, in float32 and over the ranks in their order: a product and a sum of two numbers are rounded alike
everywhere. Whoever makes weights compares their digest, whatever was likely. Source: LoRA (arXiv 2106.09685); the names
are PEFT's.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from activities.publication.delta import WrongDelta
from activities.publication.tensors import DTYPES, mapped, read_header, tensors_in
from workflows.errors import StorageError

FOLDER = "adapter"
"""Where a published version keeps its adapter, in PEFT's files."""
TENSORS_FILE = f"{FOLDER}/adapter_model.safetensors"
CONFIG_FILE = f"{FOLDER}/adapter_config.json"
PREFIX = "base_model.model."
"""What PEFT puts before the names of a model that it has wrapped."""
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
AT_ONCE = 1 << 22
"""Elements of a weight that are made together, at most."""
PIECE = 4 << 20


def merged(weight_OI: Any, a_RI: Any, b_OR: Any, scale: float) -> Any:
    """weight + scale B A in the weight's dtype and on its device, as the head of this file says."""
    import torch

    narrow = weight_OI.dtype.itemsize < torch.float32.itemsize
    kind = {"dtype": torch.float64 if narrow else torch.float32, "device": weight_OI.device}
    a_RI, b_OR = a_RI.to(**kind), b_OR.to(**kind)
    result_OI = torch.empty_like(weight_OI)
    rows = max(1, AT_ONCE // weight_OI.shape[1])
    for start in range(0, weight_OI.shape[0], rows):
        part = slice(start, start + rows)
        product_PI = b_OR[part] @ a_RI if narrow else _one_by_one(b_OR[part], a_RI)
        result_OI[part] = (weight_OI[part].to(**kind) + product_PI.mul_(scale)).to(weight_OI.dtype)
    return result_OI


def _one_by_one(b_PR: Any, a_RI: Any) -> Any:
    """B A, rounded after each product and each sum."""
    import torch

    sum_PI = b_PR[:, :1] * a_RI[:1]
    product_PI = torch.empty_like(sum_PI)
    for rank in range(1, a_RI.shape[0]):
        # Two calls: one that multiplies and adds may round once where another machine rounds twice.
        torch.mul(b_PR[:, rank : rank + 1], a_RI[rank : rank + 1], out=product_PI)
        sum_PI.add_(product_PI)
    return sum_PI


def scale_of(folder: Path) -> float:
    """alpha / rank of the adapter of a version's folder."""
    config = json.loads((folder / CONFIG_FILE).read_text())
    return float(config["lora_alpha"] / config["r"])


def changes_nothing(folder: Path) -> bool:
    """Whether all its B are zeros, as they are before the first update: the folder's weights are the bare model's."""
    pairs = tensors_in(mapped(folder / TENSORS_FILE))
    return not any(bool(value.any()) for name, value in pairs if name.endswith(UP))


def apply_adapter(
    base: Path,
    adapter: Path,
    result: Path,
    *,
    scale: float,
    base_sha256: str,
    sha256: str,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Make `result` from the weights file `base` and PEFT's file `adapter`: whole and of the digest `sha256`, or not at
    all.

    Raises WrongDelta where the two do not belong together or make something else, StorageError where the disk fails."""
    partial = result.with_name(f"{result.name}.{os.getpid()}.part")
    try:
        shutil.copyfile(base, partial)
        if (found := _sha256(partial, progress)) != base_sha256:
            raise WrongDelta(f"{base} is not the base of {adapter.name}: its sha256 is {found}, not {base_sha256}")
        _add(partial, adapter, scale, progress)
        if (found := _sha256(partial, progress)) != sha256:
            raise WrongDelta(f"{adapter} makes a file whose sha256 is {found}, not {sha256}")
        partial.replace(result)
    except OSError as error:
        raise StorageError(f"{result} can't be made from an adapter: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


class _Place(NamedTuple):
    dtype: str
    shape: list[int]
    start: int
    """Byte of the file."""


def _add(weights: Path, adapter: Path, scale: float, progress: Callable[[int], None]) -> None:
    import torch

    try:
        parts = dict(tensors_in(mapped(adapter)))
    except (KeyError, TypeError, ValueError) as error:
        raise WrongDelta(f"{adapter} is not an adapter in safetensors: {error}") from error
    with weights.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        header, begin = read_header(memory)
        for name in sorted(parts):
            if name.endswith(UP):
                continue
            stem = name.removeprefix(PREFIX).removesuffix(DOWN)
            a_RI, b_OR = parts[name], parts.get(name.removesuffix(DOWN) + UP)
            place = _place(header, f"{stem}.weight", begin)
            if b_OR is None or place is None or place.shape != [b_OR.shape[0], a_RI.shape[1]]:
                raise WrongDelta(f"{adapter} has {name}, which does not fit {weights.name}")
            if a_RI.shape[0] != b_OR.shape[1]:
                raise WrongDelta(f"{adapter}: {name} has {a_RI.shape[0]} ranks, its other half {b_OR.shape[1]}")
            dtype = getattr(torch, place.dtype)
            count = place.shape[0] * place.shape[1]
            weight_OI = torch.frombuffer(memory, dtype=dtype, count=count, offset=place.start).view(place.shape)
            weight_OI.copy_(merged(weight_OI, a_RI, b_OR, scale))
            progress(count * dtype.itemsize)
            # The file can't be closed while a tensor lies in it.
            del weight_OI


def _place(header: dict[str, Any], name: str, begin: int) -> _Place | None:
    item = header.get(name)
    if item is None or item["dtype"] not in DTYPES:
        return None
    return _Place(DTYPES[item["dtype"]], list(item["shape"]), begin + item["data_offsets"][0])


def _sha256(path: Path, progress: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
            progress(len(piece))
    return digest.hexdigest()
