#!/bin/sh
# Install the programs that pack, unpack and mount environments for the tests, and strace for
# benchmarks/shared_files.py, if missing.
# Usage: tools/packers.sh
set -eu

say() { printf 'packers: %s\n' "$1" >&2; }

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

has() {
  for program; do command -v "$program" > /dev/null || return 1; done
}

if has mksquashfs unsquashfs squashfuse zstd unzip strace; then
  exit 0
fi
if ! has apt-get; then
  say "install squashfs-tools, squashfuse, zstd, unzip and strace"
  exit 1
fi
say "installing squashfs-tools, squashfuse, zstd, unzip and strace"
as_root apt-get -o DPkg::Lock::Timeout=300 update -qq
DEBIAN_FRONTEND=noninteractive as_root apt-get -o DPkg::Lock::Timeout=300 \
  install -y -qq --no-install-recommends squashfs-tools squashfuse zstd unzip strace > /dev/null
