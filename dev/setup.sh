#!/bin/bash
# Makes a fresh Debian machine ready to build, run and test this checkout. Idempotent: on a machine that is
# ready it takes a second and prints nothing. Root, since the system it prepares runs virtual machines as
# users of their own, in control groups and network namespaces. `dev/setup.sh node` also prepares what a real
# node takes: a container runtime with its network.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }

[ "$(id -u)" = 0 ] || fail "must run as root"

cache=${XDG_CACHE_HOME:-$HOME/.cache}/forktree
mkdir -p "$cache/locks"
exec 9>"$cache/locks/setup"
# Two at once would both call apt and pip.
flock --nonblock 9 || { say "waiting for another setup on this machine"; flock 9; }

# Debian packages, each with who needs it.
packages=(
    qemu-system-x86 # the machines
    busybox-static  # the guest's first programs, and the whole of image `tiny`
    mmdebstrap      # image `python`
    erofs-utils     # images become read-only file systems
    cpio            # the guest's initrd
    kmod            # which modules the guest's kernel needs
    lz4             # Debian's kernel is unpacked with it
    gcc libc6-dev   # links the native parts
    ca-certificates # package registries
    util-linux      # setpriv, flock
    passt nftables  # the way to the outside of machines that may have one, and the wall around it
    iproute2        # networks that tests make for it; the wire to a real node
    curl            # what `make up` prints to try
)
[ "${1:-}" != node ] || packages+=(
    runc                        # starts containers, for containerd
    containernetworking-plugins # gives pods their network
    iptables                    # the plugins' and kube-proxy's rules
)
python3 -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || packages+=(python3 python3-venv)
for tool in "" clippy fmt; do
    # shellcheck disable=SC2086 # No tool is no argument.
    cargo $tool --version >/dev/null 2>&1 || rust=wanted
done

# Images are made of what apt knows; on a machine whose lists were cleaned away it knows nothing.
listed() { compgen -G '/var/lib/apt/lists/*_Packages*' >/dev/null; }

missing=()
for package in "${packages[@]}"; do
    status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$status" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ] || [ "${rust:-}" ] || ! listed; then
    command -v apt-get >/dev/null || fail "needs Debian's apt-get, for the packages ${packages[*]}"
    say "installing Debian packages: ${missing[*]} ${rust:+rust} (up to 3 minutes)"
    export DEBIAN_FRONTEND=noninteractive
    log=$(mktemp)
    quietly() { "$@" >"$log" 2>&1 || { tail -n 30 "$log" >&2; fail "$1 failed, see above"; }; }
    quietly apt-get update
    if [ "${rust:-}" ]; then
        # Debian 12's own cargo can read the crates' index through git only; the one for browsers is current.
        if apt-cache show cargo-web >/dev/null 2>&1; then
            missing+=(cargo-web rustc-web rustfmt-web rust-web-clippy)
        else
            missing+=(cargo rustc rustfmt rust-clippy)
        fi
    fi
    quietly apt-get install --yes --no-install-recommends "${missing[@]}"
    rm -f "$log"
fi

# The Python environment, made anew when what it is made from has changed.
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "needs Python 3.11 or newer as python3"
wanted=$({ python3 --version; cat pyproject.toml; } | sha256sum)
if [ "$(cat .venv/made-from 2>/dev/null)" != "$wanted" ]; then
    say "installing Python packages into .venv (about 1 minute)"
    [ -x .venv/bin/python ] || python3 -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
    echo "$wanted" >.venv/made-from
fi

# What takes long, each in the cache under the hash of its inputs; each says so when it has to build.
.venv/bin/python -m forktree_dev.cluster_binary >/dev/null
.venv/bin/python -m forktree_dev.native >/dev/null
.venv/bin/python -m forktree_dev.images >/dev/null
.venv/bin/python -m forktree_dev.monitoring.programs
if [ "${1:-}" = node ]; then
    .venv/bin/python -m forktree_dev.node_programs >/dev/null
    .venv/bin/python -m forktree_dev.container_images >/dev/null
fi
