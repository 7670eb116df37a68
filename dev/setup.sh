#!/bin/bash
# Makes a fresh Debian machine ready to build, run and test this checkout. Idempotent: on a machine that is
# ready it takes a second and prints nothing. Root, since the system it prepares runs virtual machines as
# users of their own, in control groups and network namespaces.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }

[ "$(id -u)" = 0 ] || fail "must run as root"

cache=${XDG_CACHE_HOME:-$HOME/.cache}/forktree
mkdir -p "$cache/locks"
exec 9>"$cache/locks/setup"
flock 9 # Two at once would both call apt and pip.

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
    curl            # what `make up` prints to try
)
python3 -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || packages+=(python3 python3-venv)
cargo --version >/dev/null 2>&1 || packages+=(cargo rustc)
cargo clippy --version >/dev/null 2>&1 || packages+=(rust-clippy)
cargo fmt --version >/dev/null 2>&1 || packages+=(rustfmt)

missing=()
for package in "${packages[@]}"; do
    status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$status" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
    command -v apt-get >/dev/null || fail "needs the Debian packages ${missing[*]}, and here is no apt-get"
    say "installing Debian packages: ${missing[*]} (up to 2 minutes)"
    export DEBIAN_FRONTEND=noninteractive
    log=$(mktemp)
    { apt-get update && apt-get install --yes --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 ||
        { tail -n 30 "$log" >&2; fail "apt-get failed, see above"; }
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
