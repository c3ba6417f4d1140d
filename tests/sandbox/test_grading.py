"""Tasks of the public formats in real machines: what they get, what they don't, and what an answer is worth."""

from __future__ import annotations

from pathlib import Path

import pytest

from activities.sandbox.machines.build import MEMORY_MB
from activities.sandbox.machines.state import ANSWER, State
from tests.sandbox.conftest import docker
from tests.sandbox.machines import Ground, harbor, terminal_bench
from tests.tasksets.public import HARBOR, TERMINAL_BENCH
from workflows.errors import SandboxError, VerifierBrokenByAnswer, VerifierError

pytestmark = pytest.mark.docker

DOCKERFILE = HARBOR["environment/Dockerfile"]
TOML = HARBOR["task.toml"]
REWARD = "tests/test.sh"


@pytest.mark.parametrize("make", [harbor, terminal_bench])
async def test_an_oracle_is_right_and_doing_nothing_is_not_and_both_twice(ground: Ground, tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    task = make(tmp_path)
    async with ground.playing(task) as attempt:
        for first in (1, 4):
            verdict = await attempt.verdict(first)
            assert (verdict.passed, verdict.reward, verdict.tampered) == (False, 0.0, False)
            assert "test_outputs.py::test_exists" in verdict.detail
    async with ground.playing(task) as attempt:
        assert await attempt.oracle() == ""
        for first in (1, 4):
            verdict = await attempt.verdict(first)
            assert (verdict.passed, verdict.reward, verdict.tampered) == (True, 1.0, False), verdict.detail


async def test_the_agent_has_its_machine_as_the_format_says(ground: Ground, tmp_path: Path) -> None:
    toml = TOML.replace("[agent]\n", '[agent]\nuser = "app"\n')
    image = f"{DOCKERFILE}ENV FROM_IMAGE=yes\nRUN useradd -m app && chown app /app\n"
    task = harbor(tmp_path, **{"task.toml": toml, "environment/Dockerfile": image})
    async with ground.playing(task) as attempt:
        assert await attempt.out("id -un; pwd; echo $HOME $FROM_IMAGE $COLOUR $SHADE; echo ${SECRET-none}") == (
            "app\n/app\n/home/app yes red dark\nnone"
        )
        assert await attempt.out(
            "touch /logs/agent/x /logs/artifacts/x && ls /tests 2>&1; ls /run/ratchet/box 2>&1"
        ) == (
            "ls: cannot access '/tests': No such file or directory\n"
            "ls: cannot access '/run/ratchet/box': Permission denied"
        )
        assert await attempt.out("cat /sys/class/net/*/operstate 2>/dev/null | sort -u") == "unknown"
        assert (
            await attempt("python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 80), 2)'")
        ).exit_code == 1
        assert await attempt.oracle() == ""
        assert (await attempt.verdict()).passed


async def test_root_of_a_machine_installs_and_serves_but_has_no_more_than_that(ground: Ground, tmp_path: Path) -> None:
    async with ground.playing(harbor(tmp_path)) as attempt:
        assert await attempt.out("useradd -m someone && su someone -c 'id -un'") == "someone"
        bound = "import socket; socket.socket().bind((str(), 80)); print(1)"
        assert await attempt.out(f"python3 -c '{bound}'") == "1"
        assert await attempt.out("python3 -c 'import multiprocessing; multiprocessing.Lock(); print(1)'") == "1"
        for refused in ("mount -t tmpfs none /mnt", "mknod /x b 8 0", "unshare -m true"):
            assert (await attempt(refused)).exit_code != 0, refused


async def test_partial_rewards_and_jsons_are_as_they_were_written(ground: Ground, tmp_path: Path) -> None:
    script = '#!/bin/bash\necho \'{"reward": 0.25, "speed": 3}\' > /logs/verifier/reward.json\n'
    async with ground.playing(harbor(tmp_path, **{REWARD: script})) as attempt:
        verdict = await attempt.verdict()
    assert (verdict.reward, verdict.passed, verdict.detail) == (0.25, False, "reward.json says 0.25")


async def test_the_verifier_has_its_own_variables_its_tests_read_only_and_none_of_the_agents_processes(
    ground: Ground, tmp_path: Path
) -> None:
    script = """#!/bin/bash
set -e
[ "$KEY" = abc ] && [ "$COLOUR" = red ] && [ -z "$LEFT" ] && [ "$PWD" = /app ]
! touch /tests/x 2>/dev/null
! pgrep -f "sleep 987"
[ "$(cat /app/left)" = here ]
cat /tests/data/deep.txt
echo 1 > /logs/verifier/reward.txt
"""
    toml = TOML.replace("[verifier]\n", '[verifier]\nenv = { KEY = "abc" }\n')
    task = harbor(tmp_path, **{"task.toml": toml, REWARD: script, "tests/data/deep.txt": "deep"})
    async with ground.playing(task) as attempt:
        await attempt("export LEFT=x; echo here > /app/left; echo 'export LEFT=x' >> ~/.bashrc; setsid sleep 987 &")
        verdict = await attempt.verdict()
    assert verdict.passed, verdict.detail


async def test_a_verifier_runs_as_the_user_that_its_task_names_and_reports_all_the_same(
    ground: Ground, tmp_path: Path
) -> None:
    toml = TOML.replace("[verifier]\n", '[verifier]\nuser = "checker"\n')
    image = f"{DOCKERFILE}RUN useradd -m checker\n"
    script = HARBOR[REWARD].replace("pytest /tests", '[ "$(id -un)" = checker ] && pytest /tests')
    task = harbor(tmp_path, **{"task.toml": toml, "environment/Dockerfile": image, REWARD: script})
    async with ground.playing(task) as attempt:
        await attempt.oracle()
        verdict = await attempt.verdict()
    assert verdict.passed and len(task.expected_tests) == 3, verdict.detail


async def test_with_declared_artifacts_nothing_else_of_the_machine_is_there(ground: Ground, tmp_path: Path) -> None:
    script = """#!/bin/bash
[ -e /app/other ] || [ -e /usr/local/bin/ls ] && exit 1
[ "$(cat /app/out/deep/result)" = right ] && [ "$(cat /app/kept)" = b ] && echo 1 > /logs/verifier/reward.txt
exit 0
"""
    toml = 'artifacts = ["out", {source = "/app/a", destination = "/app/kept"}]\n' + TOML.replace(
        "[verifier]\n", '[verifier]\nenvironment_mode = "separate"\n'
    )
    task = harbor(tmp_path, **{"task.toml": toml, REWARD: script})
    async with ground.playing(task) as attempt:
        await attempt(
            "mkdir -p out/deep; echo right > out/deep/result; echo b > a; touch other; cp /bin/ls /usr/local/bin"
        )
        verdict = await attempt.verdict()
    assert verdict.passed, verdict.detail


async def test_a_separate_verifier_has_an_image_of_its_own_with_its_tests(ground: Ground, tmp_path: Path) -> None:
    toml = 'artifacts = ["/app/greeting.txt"]\n' + TOML.replace(
        "[verifier]\n", '[verifier]\nenvironment_mode = "separate"\n'
    )
    image = (
        "FROM debian:bookworm-slim\nWORKDIR /grade\nCOPY . /tests\nRUN chmod +x /tests/test.sh && touch /grade/here\n"
    )
    script = (
        "#!/bin/bash\n[ -e here ] && grep -q hello /app/greeting.txt && echo 1 > /logs/verifier/reward.txt\nexit 0\n"
    )
    task = harbor(tmp_path, **{"task.toml": toml, "tests/Dockerfile": image, REWARD: script})
    async with ground.playing(task) as attempt:
        await attempt.oracle()
        verdict = await attempt.verdict()
    assert verdict.passed, verdict.detail


async def test_an_image_with_volumes_is_refused_as_nothing_bounds_or_weighs_them(
    ground: Ground, tmp_path: Path
) -> None:
    task = harbor(tmp_path, **{"environment/Dockerfile": f"{DOCKERFILE}VOLUME /data\n"})
    with pytest.raises(SandboxError, match="keeps /data in volumes") as failed:
        async with ground.playing(task):
            pass
    assert not failed.value.retryable


async def test_a_build_is_bounded_and_a_task_gets_no_more_cpus_than_there_are(ground: Ground, tmp_path: Path) -> None:
    limits = "/sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes"
    image = f"{DOCKERFILE}RUN cat {limits} 2>/dev/null > /bound; true\n"
    toml = TOML.replace("cpus = 2", "cpus = 5000")
    async with ground.playing(harbor(tmp_path, **{"environment/Dockerfile": image, "task.toml": toml})) as attempt:
        assert int(await attempt.out("cat /bound")) == MEMORY_MB << 20
        assert await attempt.oracle() == ""
        assert (await attempt.verdict()).passed


async def test_a_folder_is_compared_as_a_folder_however_much_is_in_it(
    ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.sandbox.machines.state.MOST_BYTES", 1 << 20)
    async with ground.playing(harbor(tmp_path)) as attempt:
        assert (await attempt("touch /usr/lib/python3.11 && chmod 755 /usr/lib")).exit_code == 0
        assert await attempt.oracle() == ""
        assert (await attempt.verdict()).passed


async def test_an_answer_that_is_kept_twice_leaves_no_image_without_a_name(
    ground: Ground, tmp_path: Path, docker_host: str
) -> None:
    async with ground.playing(harbor(tmp_path)) as attempt:
        state = State(ground.backend.daemon, ground.backend.boxes, attempt.id)
        await state.halt()
        first, second = await state.keep(), await state.keep()
        listed = (
            "images",
            "-q",
            "--no-trunc",
            "--filter",
            f"label={ANSWER}={ground.backend.boxes.container(attempt.id)}",
        )
        assert first != second and docker(docker_host, *listed) == second
        await ground.backend.daemon.call("tag", lambda client: client.images.delete(second, force=True))
        docker(
            docker_host,
            "commit",
            "-c",
            f"LABEL {ANSWER}={ground.backend.boxes.container(attempt.id)}",
            ground.backend.boxes.container(attempt.id),
        )
        assert docker(docker_host, *listed) != ""
        await state.forget()
        assert docker(docker_host, *listed) == ""


async def test_a_program_of_the_image_runs_beside_the_agent_and_again_beside_the_verifier(
    ground: Ground, tmp_path: Path
) -> None:
    image = f"""{DOCKERFILE}RUN printf '#!/bin/sh\\npython3 -m http.server 8080 --directory /app & exec "$@"' > /start
RUN chmod +x /start
ENTRYPOINT ["/start"]
"""
    toml = TOML + "\n[environment.healthcheck]\ncommand = 'curl -sf localhost:8080'\ninterval_sec = 0.2\nretries = 50\n"
    script = "#!/bin/bash\ncurl -s localhost:8080/x | grep -q hello && echo 1 > /logs/verifier/reward.txt\nexit 0\n"
    task = harbor(tmp_path, **{"environment/Dockerfile": image, "task.toml": toml, REWARD: script})
    async with ground.playing(task) as attempt:
        await attempt("echo hello > x")
        assert await attempt.out("curl -s localhost:8080/x") == "hello"
        assert (await attempt.verdict()).passed


async def test_a_machine_that_does_not_get_healthy_is_no_attempt(ground: Ground, tmp_path: Path) -> None:
    toml = TOML + "\n[environment.healthcheck]\ncommand = 'echo sick; false'\ninterval_sec = 0.01\nretries = 2\n"
    with pytest.raises(SandboxError, match="the health check failed: exit 1: sick") as failed:
        async with ground.playing(harbor(tmp_path, **{"task.toml": toml})):
            pass
    assert not failed.value.retryable


async def test_a_user_that_the_image_has_not_is_told(ground: Ground, tmp_path: Path) -> None:
    toml = TOML.replace("[agent]\n", '[agent]\nuser = "nobody-of-this-name"\n')
    with pytest.raises(SandboxError, match="no user 'nobody-of-this-name'"):
        async with ground.playing(harbor(tmp_path, **{"task.toml": toml})):
            pass


CRASHES = (
    "#!/bin/bash\n[ -e /app/trap ] && exit 3\n[ -e /app/greeting.txt ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n"
)


async def test_an_answer_that_alone_breaks_its_verifier_is_the_models_failure(ground: Ground, tmp_path: Path) -> None:
    async with ground.playing(harbor(tmp_path, **{REWARD: CRASHES})) as attempt:
        await attempt("touch trap")
        with pytest.raises(
            VerifierBrokenByAnswer, match=r"no reward was written.*a known-good answer passes"
        ) as broken:
            await attempt.verdict()
    assert broken.value.evidence["verifier on this answer"] == "no reward was written"
    assert broken.value.evidence["verifier on a known-good answer"] == "reward.txt says 1"


async def test_a_verifier_that_breaks_on_a_known_good_answer_too_is_nobodys_failure(
    ground: Ground, tmp_path: Path
) -> None:
    async with ground.playing(harbor(tmp_path, **{REWARD: "#!/bin/bash\necho why\nexit 1\n"})) as attempt:
        with pytest.raises(VerifierError, match="its output ends: why; on a known-good answer: no reward") as broken:
            await attempt.verdict()
    assert not broken.value.retryable


async def test_a_verifier_without_a_solution_to_ask_it_about_is_nobodys_failure(ground: Ground, tmp_path: Path) -> None:
    files = {REWARD: "#!/bin/bash\nexit 1\n", "solution/solve.sh": None}
    async with ground.playing(harbor(tmp_path, **files)) as attempt:
        with pytest.raises(VerifierError, match="no solution"):
            await attempt.verdict()


async def test_a_verifier_that_hangs_on_this_answer_is_ended_in_its_time(ground: Ground, tmp_path: Path) -> None:
    toml = TOML.replace("[verifier]\ntimeout_sec = 60.0", "[verifier]\ntimeout_sec = 2.0")
    script = CRASHES.replace("exit 3", "sleep 60")
    async with ground.playing(harbor(tmp_path, **{"task.toml": toml, REWARD: script})) as attempt:
        await attempt("touch trap")
        with pytest.raises(VerifierBrokenByAnswer, match="timed out after"):
            await attempt.verdict()


async def test_a_terminal_bench_run_without_a_summary_is_no_silent_zero(ground: Ground, tmp_path: Path) -> None:
    script = f"#!/bin/bash\n[ -e trap ] && exit 0\n{TERMINAL_BENCH['run-tests.sh']}"
    async with ground.playing(terminal_bench(tmp_path, **{"run-tests.sh": script})) as attempt:
        await attempt("touch trap")
        with pytest.raises(VerifierBrokenByAnswer, match="no summary of tests"):
            await attempt.verdict()


async def test_nothing_is_left_of_grading_but_the_tasks_image(ground: Ground, tmp_path: Path, docker_host: str) -> None:
    async with ground.playing(harbor(tmp_path)) as attempt:
        await attempt("echo x > y; echo '# more' >> /etc/profile")
        assert (await attempt.verdict()).tampered
        await attempt.verdict()
    await ground.backend.settled()
    assert docker(docker_host, "images", "-q", "ratchet/answer") == ""
    assert docker(docker_host, "ps", "-aq", "--filter", "label=ratchet.run=machines") == ""
    assert list((ground.backend.state / "grading").iterdir()) == []
