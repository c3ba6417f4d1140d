"""What changed in a file of weights, for those who have the file before it. Made by `publish`, applied on engine hosts.

A delta is bound to the sha256 of its base and of its result. It holds a header, each block that changed, and how many
there are. A block's content says which elements changed and by what bits: a small step of training leaves 98 of 100
bfloat16 values as they were. Blocks that did not change take no room. Memory is bounded by the block.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import zstandard

from activities.publication.manifest import TensorInfo
from workflows.errors import StorageError

BLOCK = 4 << 20
LARGEST_BLOCK = 64 << 20
LEVEL = 3
MAGIC = b"RATCHET\x01"
HEADER = struct.Struct("<8sBIQ32s32s")
"""Magic, bytes of an element, of a block and of the file, sha256 of base and of result."""
RECORD = struct.Struct("<II")
"""Number of a block and bytes of its content; after the last one END and how many there were."""
END = 0xFFFFFFFF
COUNTS = struct.Struct("<II")
LONG = 255
MOST = 4
"""Bytes, per byte of the block, that its content may take: more is damage."""
WIDTHS = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}


class WrongDelta(StorageError):
    """The delta is damaged, or another base's. The whole file, or the delta fetched once more, may do."""


def element_width(tensors: Iterable[TensorInfo]) -> int:
    """Bytes of the elements that make most of a file."""
    sizes: dict[int, int] = {}
    for item in tensors:
        width = WIDTHS.get(item.dtype, 1)
        sizes[width] = sizes.get(width, 0) + width * math.prod(item.shape)
    return max(sizes, key=lambda width: sizes[width], default=1)


def make_delta(
    base: Path,
    result: Path,
    delta: Path,
    *,
    base_sha256: str,
    sha256: str,
    width: int,
    limit: int,
    block: int = BLOCK,
    progress: Callable[[int], None] = lambda _: None,
) -> bool:
    """Write to `delta` how `result` is made from `base`. False, and no file, where that would take more than `limit`
    bytes. Raises WrongDelta where the two are not files of the same size with these digests, StorageError where the
    disk fails."""
    size = result.stat().st_size
    header = HEADER.pack(MAGIC, width, block, size, bytes.fromhex(base_sha256), bytes.fromhex(sha256))
    try:
        with base.open("rb") as old, result.open("rb") as new, delta.open("wb") as changes:
            changes.write(header)
            whole = _write_blocks(old, new, changes, (base_sha256, sha256), width, limit, block, progress)
    except OSError as error:
        delta.unlink(missing_ok=True)
        raise StorageError(f"{delta} can't be made: {error}") from error
    except BaseException:
        delta.unlink(missing_ok=True)
        raise
    if not whole:
        delta.unlink()
    return whole


def _write_blocks(
    old: BinaryIO,
    new: BinaryIO,
    changes: BinaryIO,
    digests: tuple[str, str],
    width: int,
    limit: int,
    block: int,
    progress: Callable[[int], None],
) -> bool:
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    before, after = hashlib.sha256(), hashlib.sha256()
    number = changed = 0
    while True:
        one, other = old.read(block), new.read(block)
        if len(one) != len(other):
            raise WrongDelta(f"{old.name} and {new.name} differ in size: there is no delta between them")
        if not one:
            break
        before.update(one)
        after.update(other)
        if one != other:
            content = compressor.compress(_changes(one, other, width))
            changes.write(RECORD.pack(number, len(content)) + content)
            changed += 1
        if changes.tell() + RECORD.size > limit:
            return False
        number += 1
        progress(len(one))
    changes.write(RECORD.pack(END, changed))
    for name, digest, expected in ((old.name, before, digests[0]), (new.name, after, digests[1])):
        if digest.hexdigest() != expected:
            raise WrongDelta(f"{name}: sha256 is {digest.hexdigest()}, not {expected}")
    return True


def apply_delta(
    base: Path,
    delta: Path,
    result: Path,
    *,
    base_sha256: str,
    sha256: str,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Make `result` from `base`: whole and of the digest `sha256`, or not at all.

    Raises WrongDelta where base or delta are not what they should be, StorageError where the disk fails."""
    partial = result.with_name(f"{result.name}.{os.getpid()}.part")
    try:
        with base.open("rb") as old, delta.open("rb") as changes, partial.open("wb") as new:
            _rebuild(old, changes, new, (base_sha256, sha256), progress)
        partial.replace(result)
    except OSError as error:
        raise StorageError(f"{result} can't be made from a delta: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _rebuild(
    old: BinaryIO, changes: BinaryIO, new: BinaryIO, digests: tuple[str, str], progress: Callable[[int], None]
) -> None:
    magic, width, block, size, base, result = HEADER.unpack(_exactly(changes, HEADER.size))
    if magic != MAGIC or not 0 < block <= LARGEST_BLOCK or width not in (1, 2, 4, 8):
        raise WrongDelta(f"{changes.name} is not a delta that this version of Ratchet reads")
    if (base.hex(), result.hex()) != digests:
        raise WrongDelta(f"{changes.name} leads from {base.hex()} to {result.hex()}, not from {' to '.join(digests)}")
    decompressor = zstandard.ZstdDecompressor()
    before, after = hashlib.sha256(), hashlib.sha256()
    following, length = RECORD.unpack(_exactly(changes, RECORD.size))
    changed = 0
    for number in range(-(-size // block)):
        one = other = _exactly(old, min(block, size - number * block))
        if number == following:
            content = _exactly(changes, length, most=MOST * block)
            try:
                other = _changed(one, _decompressed(decompressor, content, most=MOST * block), width)
            except (zstandard.ZstdError, ValueError) as error:
                raise WrongDelta(f"{changes.name} is damaged: block {number}: {error}") from error
            following, length = RECORD.unpack(_exactly(changes, RECORD.size))
            changed += 1
        before.update(one)
        after.update(other)
        new.write(other)
        progress(len(one))
    if (following, length) != (END, changed) or changes.read(1):
        raise WrongDelta(f"{changes.name} does not end where its blocks do")
    if old.read(1) or before.hexdigest() != digests[0]:
        raise WrongDelta(f"{old.name} is not the base of {changes.name}: its sha256 is not {digests[0]}")
    if after.hexdigest() != digests[1]:
        raise WrongDelta(f"{changes.name} makes a file whose sha256 is {after.hexdigest()}, not {digests[1]}")


def _exactly(file: BinaryIO, length: int, *, most: int = LARGEST_BLOCK) -> bytes:
    data = file.read(length) if length <= most else b""
    if len(data) != length:
        raise WrongDelta(f"{file.name} ends too early")
    return data


def _decompressed(decompressor: zstandard.ZstdDecompressor, content: bytes, *, most: int) -> bytes:
    # What the frame says of itself is asked first: that much memory would be taken.
    if not 0 <= zstandard.frame_content_size(content) <= most:
        raise ValueError("it says that it holds more than it can")
    return decompressor.decompress(content, allow_extra_data=False)


def _changes(one: bytes, other: bytes, width: int) -> bytes:
    """Where two blocks differ: how many elements do and how many of the gaps are long; for each the gap before it, in
    elements, as a byte; those that do not fit one; and base XOR result in planes, all low bytes first."""
    elements_N = _elements(one, width) ^ _elements(other, width)
    places_C = np.flatnonzero(elements_N)
    gaps_C = np.diff(places_C, prepend=-1) - 1
    short_C = np.minimum(gaps_C, LONG).astype(np.uint8)
    long_L = gaps_C[gaps_C >= LONG].astype("<u4")
    planes_WC = elements_N[places_C].view(np.uint8).reshape(-1, width).T
    parts = (COUNTS.pack(len(places_C), len(long_L)), short_C.tobytes(), long_L.tobytes(), planes_WC.tobytes())
    return b"".join(parts)


def _changed(one: bytes, changes: bytes, width: int) -> bytes:
    """The other block of `_changes`. Raises ValueError where these can't be changes of this block."""
    count, long = COUNTS.unpack_from(changes.ljust(COUNTS.size, b"\0"))
    if len(changes) != COUNTS.size + count * (1 + width) + 4 * long:
        raise ValueError(f"{len(changes)} bytes are not those of {count} changes")
    gaps_C = np.frombuffer(changes, np.uint8, count, COUNTS.size).astype(np.int64)
    gaps_C[gaps_C == LONG] = np.frombuffer(changes, "<u4", long, COUNTS.size + count)
    places_C = np.cumsum(gaps_C + 1) - 1
    elements_N = _elements(one, width)
    if count and places_C[-1] >= len(elements_N):
        raise ValueError("a change lies beyond its end")
    planes_WC = np.frombuffer(changes, np.uint8, count * width, COUNTS.size + count + 4 * long).reshape(width, -1)
    elements_N[places_C] ^= np.ascontiguousarray(planes_WC.T).reshape(-1).view(elements_N.dtype)
    data: bytes = elements_N.tobytes()
    return data[: len(one)]


def _elements(data: bytes, width: int) -> npt.NDArray[Any]:
    """A copy of `data` as unsigned numbers; zeros fill up the last one."""
    return np.frombuffer(data + bytes(-len(data) % width), f"<u{width}").copy()
