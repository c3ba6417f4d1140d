#!/bin/bash
# Makes sure that this machine can run sandboxes: Docker, a static busybox for the image, and gcc for sbxd; and the tools
# that it is told, by the names of their packages.
#
# Does nothing where they are there; installs them as root on Debian and its kin; says in one line what to do elsewhere.
# Starts no daemon: `ratchet up` does. Called by `make setup`, as often as one likes.
set -euo pipefail
# A user's PATH may lack what root's has.
PATH=$PATH:/usr/sbin:/sbin

refuse() {
    echo "sandboxes need Docker: $1" >&2
    exit 1
}

socket=${RATCHET_DOCKER_HOST:-${DOCKER_HOST:-unix:///var/run/docker.sock}}
answers() {
    case $socket in
    unix://*) curl -fsS -m 5 --unix-socket "${socket#unix://}" http://localhost/_ping ;;
    tcp://*) curl -fsS -m 5 "http://${socket#tcp://}/_ping" ;;
    *) return 1 ;;
    esac >/dev/null 2>&1
}

static_busybox() {
    local found
    found=$(command -v busybox) && ! head -c 4096 "$found" | grep -qa '/ld-'
}

missing=()
command -v dockerd >/dev/null || answers || missing+=(docker.io iptables)
static_busybox || missing+=(busybox-static)
{ command -v gcc && [ -e /usr/include/stdio.h ]; } >/dev/null || missing+=(gcc libc6-dev)
for tool in "$@"; do
    command -v "$tool" >/dev/null || missing+=("$tool")
done
[ ${#missing[@]} -gt 0 ] || exit 0

command -v apt-get >/dev/null ||
    refuse "install docker, a static busybox and gcc with this system's package manager, then run this again"
[ "$(id -u)" = 0 ] ||
    refuse "run \`sudo apt-get update && sudo apt-get install -y ${missing[*]}\`, add yourself to the group docker"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "installing ${missing[*]}"
{ apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"; } \
    >"$log" 2>&1 || {
    tail -n 5 "$log" >&2
    refuse "apt-get could not install ${missing[*]} (above); install them by hand, then run this again"
}
