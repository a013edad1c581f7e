#!/bin/sh
# Install zsh and fish for the tests of the completion, and tmux for those of `top`, if missing.
# Usage: tools/shells.sh
set -eu

say() { printf 'shells: %s\n' "$1" >&2; }

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

if command -v zsh > /dev/null && command -v fish > /dev/null \
  && command -v tmux > /dev/null; then
  exit 0
fi
if ! command -v apt-get > /dev/null; then
  say "install zsh, fish and tmux: tests type into them"
  exit 1
fi
say "installing zsh, fish and tmux"
as_root apt-get update -qq
DEBIAN_FRONTEND=noninteractive as_root apt-get -o DPkg::Lock::Timeout=300 \
  install -y -qq zsh fish tmux > /dev/null
