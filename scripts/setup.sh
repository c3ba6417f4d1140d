#!/usr/bin/env bash
# Make .venv with everything Ratchet needs: the GPU build of vLLM where nvidia-smi is, the CPU build elsewhere.
# Called by `make setup`, again whenever pyproject.toml has changed; a second call is quick.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
if ! command -v "$python" >/dev/null; then
  echo "Ratchet needs Python 3.11 or newer, and there is no $python; set PYTHON to one" >&2
  exit 1
fi
if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))'; then
  echo "Ratchet needs Python 3.11 to 3.13, and $python is $("$python" --version); set PYTHON to another" >&2
  exit 1
fi

if [ ! -x .venv/bin/pip ]; then
  # Debian splits venv and its pip into a package of their own.
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
      echo "$python lacks its venv module: install python3-venv (apt-get install python3-venv)" >&2
      exit 1
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >/dev/null
  fi
  "$python" -m venv .venv
fi

if command -v nvidia-smi >/dev/null; then hardware=gpu; else hardware=cpu; fi
echo "installing for $hardware into .venv (several minutes the first time)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check uv
# uv doesn't read pip's variables: hand on where this machine keeps wheels of its own.
export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"
[ -n "$UV_FIND_LINKS" ] || unset UV_FIND_LINKS
export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-${PIP_DEFAULT_TIMEOUT:-180}}"
# An engine starts in half the time where its thousands of modules are compiled already.
.venv/bin/uv pip install --compile-bytecode --python .venv/bin/python -e ".[$hardware,smollm2,dev]"
touch .venv/.ratchet-installed
