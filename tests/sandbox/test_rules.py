"""The pure parts: text, evidence, results."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.sandbox.cgroup import cgroup_parent, raise_share
from activities.sandbox.channel import ChannelLost, Result, journaled, key_of, parse_result
from activities.sandbox.container import SandboxSpec
from activities.sandbox.evidence import broken_by_agent, cause_of_death
from activities.sandbox.slots import Slots
from activities.sandbox.text import cap_bytes, render
from workflows.contracts import ActOutput
from workflows.converter import MAX_PAYLOAD_BYTES
from workflows.errors import SandboxError


def result(head: bytes = b"", tail: bytes = b"", total: int | None = None, **fields: object) -> Result:
    base = Result(0, None, False, 0, 0.1, len(head + tail) if total is None else total, head, tail)
    return Result(**(base.__dict__ | fields))  # type: ignore[arg-type]


@given(st.binary(max_size=3000), st.integers(100, 400))
def test_rendered_output_never_exceeds_its_budget_and_has_no_nul(data: bytes, budget: int) -> None:
    half = cap_bytes(budget) // 2
    head, rest = data[:half], data[half:]
    text = render(result(head, rest[-half:], len(data)), budget)
    assert len(text) <= budget
    assert "\0" not in text
    text.encode()


@given(st.text(max_size=300).filter(lambda text: "\0" not in text))
def test_output_within_the_budget_is_untouched(text: str) -> None:
    data = text.encode("utf-8", "replace")
    assert render(result(data[:7], data[7:]), 300) == data.decode()


def test_a_result_cut_short_is_no_result() -> None:
    line = b"0 0 0 0 12 5 3 2 0 0 1 48 -\n"
    assert parse_result(line + b"hello", replayed=False).head == b"hel"
    for data in (b"", line, line + b"hell", b"nonsense\n"):
        with pytest.raises(ChannelLost):
            parse_result(data, replayed=False)


def test_an_unreadable_journal_is_final(tmp_path: Path) -> None:
    assert journaled(tmp_path / "none", "t0") is None
    (tmp_path / key_of("t0")).write_bytes(b"half a li")
    with pytest.raises(SandboxError) as unreadable:
        journaled(tmp_path, "t0")
    assert not unreadable.value.retryable


def test_a_healthy_result_blames_nobody() -> None:
    assert broken_by_agent(result(pids=3, pids_max=48, pids_hits=7)) == ""
    assert broken_by_agent(result(pids=-1, pids_max=-1)) == ""


def test_only_the_memory_limit_makes_a_dead_container_the_agents_doing() -> None:
    assert cause_of_death({"Running": True, "Status": "running"}) is None
    killed = cause_of_death({"Running": False, "Status": "exited", "ExitCode": 137, "OOMKilled": False})
    assert killed is not None and not killed.by_agent and "exit 137" in str(killed)
    out_of_memory = cause_of_death({"Running": False, "Status": "exited", "ExitCode": 137, "OOMKilled": True})
    assert out_of_memory is not None and out_of_memory.by_agent


def test_the_file_systems_of_a_sandbox_leave_memory_to_its_processes() -> None:
    spec = SandboxSpec()
    assert spec.work_mb + spec.data_mb + spec.tmp_mb <= spec.memory_mb / 2


def test_the_cpu_share_is_raised_where_the_parent_is_ours(tmp_path: Path) -> None:
    assert cgroup_parent({"CgroupDriver": "systemd"}) == ""
    shares = tmp_path / "cpu" / "ratchet" / "cpu.shares"
    shares.parent.mkdir(parents=True)
    shares.write_text("1024\n")
    raise_share(cgroup_parent({"CgroupDriver": "cgroupfs"}), tmp_path)
    assert shares.read_text() == "8192"


async def test_slots_count_what_lives_and_what_starts() -> None:
    living = {"a"}

    async def look() -> set[str]:
        return living

    slots = Slots(2, look, look)
    assert await slots.take("a") < 0.1, "one that lives needs no further slot"
    await slots.take("b")
    slots.started("b")
    await slots.free("a")
    await slots.take("c")


@pytest.mark.parametrize("byte", [b"\x01", b"\x1b", b'"', "\u754c".encode()])
def test_the_longest_output_fits_a_message_whatever_it_is_made_of(byte: bytes) -> None:
    data = byte * 16000
    out = ActOutput(exit_code=0, output=render(result(data, b""), 16000))
    assert len(out.model_dump_json()) < MAX_PAYLOAD_BYTES
