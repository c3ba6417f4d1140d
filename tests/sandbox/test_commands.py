"""What a command gives back, over both channels."""

from __future__ import annotations

import time

import pytest

from activities.sandbox.text import cap_bytes, render
from tests.sandbox.conftest import Box

pytestmark = pytest.mark.docker


async def test_output_of_both_streams_comes_in_order_with_the_exit_code(shared_box: Box) -> None:
    result = await shared_box("echo one; echo two >&2; echo three; exit 3")
    assert (result.exit_code, result.signal, result.timed_out) == (3, None, False)
    assert result.head + result.tail == b"one\ntwo\nthree\n"


async def test_an_agent_is_nobody_in_its_home_and_its_files_stay(shared_box: Box) -> None:
    assert await shared_box.out("id -u; pwd; echo $HOME; echo kept > note") == "1000\n/work\n/work"
    assert await shared_box.out("cat note") == "kept"


async def test_root_runs_with_the_trusted_path(shared_box: Box) -> None:
    assert await shared_box.out("id -u; echo ${PATH%%:*}", root=True) == "0\n/run/ratchet/tools/bin"


async def test_an_unknown_command_is_exit_127(shared_box: Box) -> None:
    assert (await shared_box("no-such-thing")).exit_code == 127


async def test_a_command_that_kills_itself_is_ended_by_the_signal(shared_box: Box) -> None:
    result = await shared_box("kill -9 $$")
    assert (result.exit_code, result.signal) == (None, 9)


async def test_invalid_utf8_and_nul_come_back_as_replacement_characters(shared_box: Box) -> None:
    result = await shared_box(r"printf 'a\377b\000c'")
    assert result.head + result.tail == b"a\xffb\0c"
    assert render(result, 100) == "a\ufffdb\ufffdc"


async def test_long_output_keeps_its_start_and_its_end_and_says_how_long_it_was(shared_box: Box) -> None:
    result = await shared_box("seq 1 50000", cap_bytes=cap_bytes(200))
    text = render(result, 200)
    assert len(text) <= 200
    assert text.startswith("1\n2\n")
    assert text.endswith("49999\n50000\n")
    assert "[... cut: 288894 bytes in all ...]" in text


async def test_the_kept_bytes_are_the_first_and_the_last(sbxd_box: Box) -> None:
    for total in (1, 9, 10, 11, 15, 20, 21, 99, 100_001):
        result = await sbxd_box(f"head -c {total} /dev/zero | tr '\\0' x | sed 's/^x/A/; s/x$/Z/'", cap_bytes=20)
        whole = b"A" if total == 1 else b"A" + b"x" * (total - 2) + b"Z"
        assert result.total_bytes == total
        assert result.head + result.tail == (whole if total <= 20 else whole[:10] + whole[-10:])


async def test_a_flood_is_counted_and_cut(sbxd_box: Box) -> None:
    result = await sbxd_box("head -c 200000000 /dev/zero", timeout_s=30)
    assert (result.exit_code, result.total_bytes) == (0, 200_000_000)
    assert len(result.head + result.tail) == 65536
    rss = await sbxd_box.out("grep VmRSS /proc/1/status")
    assert int(rss.split()[1]) < 2048, "sbxd grew"


async def test_without_sbxd_a_flood_ends_at_64_mib(exec_box: Box) -> None:
    result = await exec_box("cat /dev/zero", timeout_s=30)
    assert (result.signal, result.total_bytes) == (25, 64 << 20)
    assert len(result.head + result.tail) == 65536


async def test_a_background_process_neither_holds_the_answer_nor_dies(shared_box: Box) -> None:
    began = time.monotonic()
    result = await shared_box("(while :; do echo noise; sleep 0.1; echo >> beat; done) & echo started")
    assert time.monotonic() - began < 3
    assert b"started" in result.head
    before = await shared_box.out("sleep 0.3; wc -l < beat")
    assert int(before) < int(await shared_box.out("sleep 0.3; wc -l < beat"))


async def test_a_command_too_long_for_the_kernel_fails_as_a_command(sbxd_box: Box) -> None:
    result = await sbxd_box("true " + "x" * 200_000)
    assert result.exit_code == 126
    assert b"Argument list too long" in result.head


async def test_a_nul_byte_in_a_command_is_dropped(shared_box: Box) -> None:
    assert await shared_box.out("echo a\0b") == "ab"
