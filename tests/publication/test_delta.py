"""Deltas between files of weights: exact, small, and either whole or an error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from activities.publication import delta as deltas
from activities.publication.delta import WrongDelta, apply_delta, element_width, make_delta
from activities.publication.manifest import TensorInfo
from storage.objects import sha256_file
from workflows.errors import StorageError

BLOCK = 4096


@dataclass
class Files:
    base: Path
    result: Path
    delta: Path
    made: Path

    def make(self, *, width: int = 2, limit: int = 1 << 30, block: int = BLOCK) -> bool:
        digests = {"base_sha256": sha256_file(self.base), "sha256": sha256_file(self.result)}
        return make_delta(self.base, self.result, self.delta, **digests, width=width, limit=limit, block=block)

    def apply(self) -> bytes:
        digests = {"base_sha256": sha256_file(self.base), "sha256": sha256_file(self.result)}
        apply_delta(self.base, self.delta, self.made, **digests)
        return self.made.read_bytes()

    def refused(self, match: str) -> None:
        """The delta is one clear error that a retry may mend, and leaves nothing."""
        digests = {"base_sha256": sha256_file(self.base), "sha256": sha256_file(self.result)}
        before = set(self.made.parent.iterdir())
        with pytest.raises(WrongDelta, match=match) as caught:
            apply_delta(self.base, self.delta, self.made, **digests)
        assert caught.value.retryable
        assert set(self.made.parent.iterdir()) == before


def files_in(folder: Path, base: bytes, result: bytes) -> Files:
    files = Files(*(folder / name for name in ("base", "result", "delta", "made")))
    files.base.write_bytes(base)
    files.result.write_bytes(result)
    files.made.unlink(missing_ok=True)
    return files


def changed_at(base: bytes, places: list[int]) -> bytes:
    data = bytearray(base)
    for place in places:
        data[place] ^= 0x41
    return bytes(data)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Five blocks, the last one cut short; the second and the last differ."""
    base = np.random.default_rng(0).integers(0, 256, 4 * BLOCK + 999, dtype=np.uint8).tobytes()
    return files_in(tmp_path, base, changed_at(base, [BLOCK + 7, BLOCK + 8, 4 * BLOCK + 998]))


@given(
    base=st.binary(max_size=600),
    flips=st.lists(st.tuples(st.integers(0, 599), st.integers(1, 255)), max_size=40),
    width=st.sampled_from([1, 2, 4, 8]),
    block=st.sampled_from([8, 64, 512]),
)
def test_any_file_comes_back_from_any_base_of_its_size(
    tmp_path_factory: pytest.TempPathFactory, base: bytes, flips: list[tuple[int, int]], width: int, block: int
) -> None:
    result = bytearray(base)
    for place, bits in flips:
        if place < len(base):
            result[place] ^= bits
    files = files_in(tmp_path_factory.getbasetemp(), base, bytes(result))
    assert files.make(width=width, block=block)
    assert files.apply() == bytes(result)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_blocks_that_changed_wholly_and_changes_far_apart_come_back(tmp_path: Path, width: int) -> None:
    rng = np.random.default_rng(1)
    base = rng.integers(0, 256, 3 * BLOCK, dtype=np.uint8).tobytes()
    noise = rng.integers(0, 256, BLOCK, dtype=np.uint8).tobytes()
    far = changed_at(base, [0, 300 * width, BLOCK - 1, 2 * BLOCK + 255 * width])
    files = files_in(tmp_path, base, noise + far[BLOCK:])
    assert files.make(width=width)
    assert files.apply() == noise + far[BLOCK:]
    files = files_in(tmp_path, base, far)
    assert files.make(width=width)
    assert files.apply() == far


def test_blocks_that_did_not_change_take_no_room(files: Files) -> None:
    files.result.write_bytes(files.base.read_bytes())
    assert files.make()
    assert files.delta.stat().st_size == deltas.HEADER.size + deltas.RECORD.size


def test_a_delta_above_its_limit_is_given_up_and_leaves_no_file(files: Files) -> None:
    assert files.make()
    size = files.delta.stat().st_size
    assert files.make(limit=size)
    assert not files.make(limit=size - 1)
    assert not files.delta.exists()


def test_a_base_that_is_another_file_is_found_out_on_both_sides(files: Files) -> None:
    assert files.make()
    told = {"base_sha256": sha256_file(files.base), "sha256": sha256_file(files.result)}
    files.base.write_bytes(changed_at(files.base.read_bytes(), [2 * BLOCK]))
    with pytest.raises(WrongDelta, match="is not the base of"):
        apply_delta(files.base, files.delta, files.made, **told)
    assert not files.made.exists()
    with pytest.raises(WrongDelta, match="sha256 is"):
        make_delta(files.base, files.result, files.delta, **told, width=2, limit=1 << 30, block=BLOCK)
    assert not files.delta.exists()
    files.base.write_bytes(files.base.read_bytes()[:-1])
    with pytest.raises(WrongDelta, match="differ in size"):
        files.make()
    assert not files.delta.exists()


def test_a_delta_between_other_files_is_refused_before_a_byte_is_written(files: Files) -> None:
    assert files.make()
    files.result.write_bytes(b"another")
    files.refused("leads from")


def test_a_delta_cut_anywhere_is_refused(files: Files) -> None:
    assert files.make()
    whole = files.delta.read_bytes()
    for length in (0, 5, deltas.HEADER.size, deltas.HEADER.size + 3, len(whole) // 2, len(whole) - 1):
        files.delta.write_bytes(whole[:length])
        files.refused("ends too early")


def test_a_delta_with_a_byte_too_many_is_refused(files: Files) -> None:
    assert files.make()
    files.delta.write_bytes(files.delta.read_bytes() + b"\0")
    files.refused("does not end where its blocks do")


def test_a_damaged_byte_never_makes_another_file_wherever_it_is(files: Files) -> None:
    """A few bits of zstandard's frames say nothing: without them the same file is made."""
    assert files.make()
    whole = files.delta.read_bytes()
    harmless = 0
    for place in range(len(whole)):
        files.delta.write_bytes(changed_at(whole, [place]))
        try:
            assert files.apply() == files.result.read_bytes()
            harmless += 1
        except WrongDelta:
            assert not files.made.exists()
        files.made.unlink(missing_ok=True)
    assert harmless <= 2


def content(*, count: int = 1, long: int = 0, gaps: bytes = b"\3", rest: bytes = b"\1\0") -> bytes:
    return deltas.COUNTS.pack(count, long) + gaps + rest


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        content(count=2),
        content(long=1),
        content(gaps=b"\xff", rest=b"\xff\xff\0\0\1\0", long=1),
        content(gaps=b"\xff"),
        content(count=2, gaps=b"\xff\xff", rest=b"\xff\0\0\0" * 3 + bytes(4), long=3),
    ],
)
def test_blocks_that_do_not_hold_what_they_say_are_refused(files: Files, wrong: bytes) -> None:
    assert files.make()
    packed = zstandard.ZstdCompressor().compress(wrong)
    head = files.delta.read_bytes()[: deltas.HEADER.size]
    files.delta.write_bytes(head + deltas.RECORD.pack(1, len(packed)) + packed + deltas.RECORD.pack(deltas.END, 1))
    files.refused("is damaged: block 1")


@pytest.mark.parametrize(
    "packed",
    [
        zstandard.ZstdCompressor().compress(bytes(5 * BLOCK)),
        zstandard.ZstdCompressor(write_content_size=False).compress(content()),
        zstandard.ZstdCompressor().compress(content()) + b"\0",
    ],
    ids=["larger than a block can be", "of a size that it does not tell", "with more behind it"],
)
def test_frames_that_can_not_be_a_blocks_are_refused(files: Files, packed: bytes) -> None:
    assert files.make()
    head = files.delta.read_bytes()[: deltas.HEADER.size]
    files.delta.write_bytes(head + deltas.RECORD.pack(1, len(packed)) + packed + deltas.RECORD.pack(deltas.END, 1))
    files.refused("is damaged")


@pytest.mark.parametrize("field", [{"magic": b"RATCHET\x02"}, {"block": 1 << 30}, {"width": 3}])
def test_a_delta_of_another_kind_is_refused(files: Files, field: dict[str, object]) -> None:
    assert files.make()
    whole = files.delta.read_bytes()
    names = ("magic", "width", "block", "size", "base", "result")
    header = dict(zip(names, deltas.HEADER.unpack(whole[: deltas.HEADER.size]), strict=True)) | field
    files.delta.write_bytes(deltas.HEADER.pack(*header.values()) + whole[deltas.HEADER.size :])
    files.refused("is not a delta that this version of Ratchet reads")


def test_work_that_is_told_to_stop_leaves_no_file(files: Files) -> None:
    def stop(_: int) -> None:
        raise RuntimeError("stopped")

    told = {"base_sha256": sha256_file(files.base), "sha256": sha256_file(files.result)}
    with pytest.raises(RuntimeError, match="stopped"):
        make_delta(files.base, files.result, files.delta, **told, width=2, limit=1 << 30, progress=stop)
    assert not files.delta.exists()
    assert files.make()
    with pytest.raises(RuntimeError, match="stopped"):
        apply_delta(files.base, files.delta, files.made, **told, progress=stop)
    assert {path.name for path in files.made.parent.iterdir()} == {"base", "result", "delta"}


def test_a_disk_that_fails_is_an_error_that_names_the_file(files: Files) -> None:
    assert files.make()
    files.made = files.made.parent / "nowhere" / "made"
    with pytest.raises(StorageError, match="nowhere"):
        files.apply()
    files.delta = files.made
    with pytest.raises(StorageError, match="nowhere"):
        files.make()


def test_elements_are_as_wide_as_most_of_the_file() -> None:
    small = TensorInfo(name="a", shape=[10], dtype="float32")
    large = TensorInfo(name="b", shape=[3, 10], dtype="bfloat16")
    assert element_width([small, large]) == 2
    assert element_width([small]) == 4
    assert element_width([TensorInfo(name="c", shape=[2], dtype="uint8")]) == 1
    assert element_width([]) == 1
