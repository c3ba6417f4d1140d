"""What an agent changed in its machine: what is carried to the verifier, left behind, looked at, or tampering."""

from __future__ import annotations

import pytest

from activities.sandbox.machines.changes import Change, Kind, Review, review
from activities.sandbox.machines.facts import ImageFacts, User

FACTS = ImageFacts(
    env={"PATH": "/opt/venv/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": "/srv"},
    user="",
    workdir="/app",
    entrypoint=[],
    volumes=[],
    users={"root": User(uid=0, gid=0, home="/root"), "app": User(uid=1000, gid=1000, home="/home/app")},
    programs=["/usr/bin/bash", "/usr/bin/python3", "/opt/venv/bin/pytest", "/usr/bin/ls"],
    libraries=["libc.so.6", "libm.so.6"],
    interpreters=["/opt/conda/lib/python3.12", "/usr/lib/python3", "/usr/lib/python3.11"],
    library_folders=["/opt/conda/lib", "/usr/lib"],
    modules=["argparse", "json", "packaging", "yaml"],
)
MOUNTS = ["/tests", "/logs/verifier", "/run/ratchet/box", "/opt/ratchet-kit"]


STARTS = ["/entrypoint.sh", "sh", "-c", "exec ./serve.sh --port=80; curl localhost"]


def weigh(*paths: str, kind: Kind = Kind.ADDED, may_change: list[str] | None = None) -> Review:
    return review(
        [Change(path, kind) for path in paths],
        FACTS,
        mounts=MOUNTS,
        may_change=may_change or [],
        starts=STARTS,
        ahead=["/srv"],
    )


@pytest.mark.parametrize(
    "path",
    [
        "/app/result.txt",
        "/app/src/conftest.py",
        "/etc/nginx/nginx.conf",
        "/root/notes",
        "/usr/local/bin/povray",
        "/usr/local/lib/libmine.so.1",
        "/usr/lib/python3/dist-packages/flask/__init__.py",
        "/home/app/.local/lib/python3.11/site-packages/flask/app.py",
        "/app/__pycache__/solution.cpython-311.pyc",
        "/tmp/x",
        "/logs/artifacts/out",
        "/app/pytest.ini",
        "/app/pytest.log",
        "/app/pytest.txt",
        "/app/json.py",
        "/srv/html/index.html",
        "/srv/mine.py",
        "/etc/alternatives/editor",
        "/usr/local/lib/python3.11/dist-packages/flask/__init__.py",
        "/usr/local/lib/python3.13/json/__init__.py",
        "/usr/local/lib/python3.11/dist-packages/packaging-24.0.dist-info/METADATA",
    ],
)
def test_what_an_honest_answer_adds_is_carried(path: str) -> None:
    weighed = weigh(path)
    assert weighed.carried == [path] and not weighed.tampered and not weighed.dropped


@pytest.mark.parametrize("kind", [Kind.CHANGED, Kind.DELETED])
@pytest.mark.parametrize(
    "path",
    [
        "/usr/bin/bash",
        "/usr/lib/x86_64-linux-gnu/libc.so.6",
        "/bin",
        "/usr",
        "/opt/venv/bin/pytest",
        "/opt/venv/lib/python3.12/site-packages/_pytest/main.py",
        "/usr/lib/python3.11/json/__init__.py",
        "/etc/profile",
        "/etc/ld.so.conf.d/libc.conf",
        "/etc/nsswitch.conf",
        "/etc/alternatives/awk",
        "/etc/ssl/openssl.cnf",
        "/etc",
        "/app/venv/pyvenv.cfg",
        "/opt/conda/lib/python3.12/json/__init__.py",
        "/opt/conda/lib/libz.so.1",
        "/entrypoint.sh",
        "/app/serve.sh",
    ],
)
def test_trusted_paths_that_were_there_before_are_suspects(path: str, kind: Kind) -> None:
    assert weigh(path, kind=kind).suspects == [path]


@pytest.mark.parametrize("path", ["/app/main.py", "/etc/hosts.allow", "/root/data", "/usr/share/doc/x"])
def test_what_nothing_trusts_may_change(path: str) -> None:
    assert weigh(path, kind=Kind.CHANGED).carried == [path]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/usr/local/bin/python3", "stands before a program"),
        ("/usr/local/bin/ls", "stands before a program"),
        ("/usr/local/lib/libc.so.6", "stands before a library"),
        ("/etc/ld.so.preload", "every program that starts"),
        ("/etc/ld.so.conf.d/mine.conf", "every program that starts"),
        ("/usr/lib/python3/dist-packages/sitecustomize.py", "every Python"),
        ("/home/app/.local/lib/python3.11/site-packages/usercustomize.py", "every Python"),
        ("/srv/sitecustomize.pyc", "every Python"),
        ("/conftest.py", "configures the tests"),
        ("/pytest.ini", "configures the tests"),
        ("/pyproject.toml", "configures the tests"),
        ("/app/pytest.py", "in the place of what tests"),
        ("/app/_pytest/__init__.py", "in the place of what tests"),
        ("/app/pluggy/__init__.py", "in the place of what tests"),
        ("/app/pytest.cpython-311-x86_64-linux-gnu.so", "in the place of what tests"),
        ("/app/pytest.pyc", "in the place of what tests"),
        ("/srv/json.py", "in the place of what tests"),
        ("/srv/argparse/__init__.py", "in the place of what tests"),
        ("/usr/lib/python3/dist-packages/sitecustomize/__init__.py", "every Python"),
        ("/home/app/.local/lib/python3.11/site-packages/usercustomize/__init__.py", "every Python"),
        ("/usr/lib/python3.11/argparse/__init__.py", "before a module of Python's"),
        ("/usr/lib/python3.11/json.cpython-311-x86_64-linux-gnu.so", "before a module of Python's"),
        ("/opt/conda/lib/python3.12/argparse", "before a module of Python's"),
        ("/usr/lib/python311.zip", "before a module of Python's"),
        ("/usr/local/lib/python3.11/dist-packages/packaging/__init__.py", "before a module of Python's"),
        ("/root/.local/lib/python3.11/site-packages/yaml.py", "before a module of Python's"),
        ("/etc/nsswitch.conf", "every program that starts"),
        ("/usr/lib/x86_64-linux-gnu/libnss_e.so.2", "looks up a name"),
        ("/usr/bin/pyvenv.cfg", "where its library is"),
        ("/usr/pyvenv.cfg", "where its library is"),
    ],
)
def test_what_starts_with_programs_or_stands_in_their_place_is_tampering(path: str, why: str) -> None:
    weighed = weigh(path)
    assert len(weighed.tampered) == 1 and why in weighed.tampered[0] and path in weighed.tampered[0]


@pytest.mark.parametrize(
    "path",
    [
        "/root/.bashrc",
        "/home/app/.profile",
        "/root/.config/uv/uv.toml",
        "/root/.cache/uv/archive/x",
        "/root/.local/bin/uvx",
        "/root/.local/bin/env",
        "/etc/profile.d/mine.sh",
        "/etc/pip.conf",
        "/usr/local/bin/uv",
        "/usr/lib/python3/dist-packages/pytest/__init__.py",
        "/usr/lib/python3/dist-packages/pluggy-1.0.dist-info/METADATA",
        "/usr/lib/python3/dist-packages/__pycache__/yaml.cpython-311.pyc",
        "/root/.local/lib/python3.11/site-packages/_pytest/runner.py",
    ],
)
def test_what_no_honest_answer_needs_stays_behind(path: str) -> None:
    weighed = weigh(path)
    assert weighed.dropped == [path] and not weighed.tampered


def test_new_files_that_python_may_run_are_looked_at() -> None:
    paths = [
        "/usr/lib/python3/dist-packages/mine.pth",
        "/opt/venv/lib/python3.12/site-packages/mine-1.0.dist-info/entry_points.txt",
    ]
    assert weigh(*paths).look == paths


def test_what_the_verifiers_own_folders_held_is_of_no_account_but_they_must_be_folders() -> None:
    weighed = weigh("/tests", "/tests/conftest.py", "/logs", "/logs/verifier/reward.txt", "/run", "/run/ratchet/box/x")
    assert weighed.folders == ["/tests", "/logs", "/run"]
    assert not weighed.carried and not weighed.tampered


def test_what_a_task_declares_may_change() -> None:
    paths = ["/usr/lib/python3/dist-packages/pandas/core.py", "/usr/bin/bash"]
    weighed = weigh(*paths, kind=Kind.CHANGED, may_change=["/usr/lib/python3/dist-packages/pandas"])
    assert (weighed.carried, weighed.suspects) == ([paths[0]], [paths[1]])


def test_a_folder_counts_for_what_is_in_it_but_a_program_that_became_one_counts() -> None:
    changes = [
        Change("/usr", Kind.CHANGED),
        Change("/usr/bin", Kind.CHANGED),
        Change("/usr/bin/bash", Kind.CHANGED),
        Change("/usr/bin/bash/x", Kind.ADDED),
        Change("/usr/bin/new", Kind.ADDED),
    ]
    weighed = review(changes, FACTS, mounts=MOUNTS, may_change=[])
    assert weighed.suspects == ["/usr/bin/bash"] and weighed.carried == ["/usr/bin/bash/x", "/usr/bin/new"]


def test_where_everything_lies_in_the_root_its_settings_are_the_answers_own() -> None:
    facts = FACTS.model_copy(update={"workdir": "/"})
    weighed = review([Change("/pyproject.toml", Kind.ADDED)], facts, mounts=MOUNTS, may_change=[])
    assert weighed.carried == ["/pyproject.toml"]


def test_an_environment_that_the_agent_made_is_its_own_and_one_of_the_image_is_not() -> None:
    site = "/app/venv/lib/python3.11/site-packages"
    new = weigh("/app/venv", site, f"{site}/distutils-precedence.pth", f"{site}/pytest/__init__.py")
    assert not new.look and not new.dropped and f"{site}/distutils-precedence.pth" in new.carried
    old = weigh(f"{site}/distutils-precedence.pth", f"{site}/pytest/__init__.py")
    assert old.look == [f"{site}/distutils-precedence.pth"] and old.dropped == [f"{site}/pytest/__init__.py"]
    home = "/root/.local/lib/python3.11/site-packages"
    assert weigh("/root/.local", home, f"{home}/mine.pth").look == [f"{home}/mine.pth"]


def test_packages_of_an_interpreter_of_the_image_count_also_in_a_folder_that_is_new() -> None:
    site = "/usr/local/lib/python3.11/dist-packages"
    weighed = weigh("/usr/local/lib/python3.11", site, f"{site}/packaging", f"{site}/packaging/__init__.py")
    assert len(weighed.tampered) == 1 and "packaging" in weighed.tampered[0]
    other = "/usr/local/lib/python3.13/site-packages"
    assert not weigh("/usr/local/lib/python3.13", other, f"{other}/packaging/__init__.py").tampered


def test_what_may_be_a_link_in_the_place_of_a_module_is_looked_at() -> None:
    paths = ["/app/pytest", "/srv/json", "/usr/lib/python3/dist-packages/yaml"]
    weighed = weigh(*paths)
    assert weighed.links == paths and weighed.carried == paths


@pytest.mark.parametrize("kind", list(Kind))
def test_the_loaders_cache_is_the_images_whatever_was_made_of_it(kind: Kind) -> None:
    weighed = weigh("/etc/ld.so.cache", kind=kind)
    assert (weighed.restored, weighed.dropped) == (["/etc/ld.so.cache"], ["/etc/ld.so.cache"])
    assert not weighed.tampered and not weighed.suspects
    assert not weigh("/app/x").restored


def test_an_environment_that_uv_would_find_stays_behind_unless_it_was_there_or_may_change() -> None:
    def weighed(kind: Kind, may_change: list[str]) -> Review:
        changes = [Change(path, kind) for path in ("/app/.venv", "/app/.venv/bin", "/app/.venv/bin/python")]
        return review(changes, FACTS, mounts=MOUNTS, may_change=may_change, left=["/app/.venv", "/.venv"])

    new = weighed(Kind.ADDED, [])
    assert (new.dropped, new.carried) == (["/app/.venv"], [])
    assert weighed(Kind.CHANGED, []).carried == ["/app/.venv/bin/python"]
    assert not weighed(Kind.ADDED, ["/app/.venv"]).dropped
