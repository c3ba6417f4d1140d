"""The safetensors format, of a file that is in memory. Used where weights are published, fetched and loaded."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}


def read_header(buffer: bytearray | mmap.mmap) -> tuple[dict[str, Any], int]:
    """The safetensors header without its metadata, and where its tensors' bytes begin: 8 bytes little-endian length, a
    JSON header, then the bytes that its offsets divide. Raises ValueError where there is none."""
    length = int.from_bytes(buffer[:8], "little")
    if not 0 < length <= len(buffer) - 8:
        raise ValueError("no safetensors header")
    header: dict[str, Any] = json.loads(bytes(buffer[8 : 8 + length]))
    header.pop("__metadata__", None)
    return header, 8 + length


def tensors_in(buffer: bytearray | mmap.mmap) -> Iterator[tuple[str, Any]]:
    """Name and torch tensor of each, which lie in the buffer."""
    import torch

    header, begin = read_header(buffer)
    for name, item in header.items():
        start, end = item["data_offsets"]
        dtype = getattr(torch, DTYPES[item["dtype"]])
        if start == end:
            yield name, torch.empty(item["shape"], dtype=dtype)
            continue
        count = (end - start) // dtype.itemsize
        flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=begin + start)
        yield name, flat.view(item["shape"])


def mapped(path: Path) -> mmap.mmap:
    """The file, copied on write: torch wants memory that it could write to, and the file stays what it is."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def tensors_below(folder: Path) -> Iterator[tuple[str, Any]]:
    """Those of all safetensors files of a folder, mapped."""
    for path in sorted(folder.glob("*.safetensors")):
        yield from tensors_in(mapped(path))
