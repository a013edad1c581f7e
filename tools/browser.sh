#!/bin/sh
# Install Chromium for the tests of the report, if missing.
# Usage: tools/browser.sh
set -eu

say() { printf 'browser: %s\n' "$1" >&2; }

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

if command -v chromium > /dev/null || command -v chromium-browser > /dev/null; then
  exit 0
fi
if ! command -v apt-get > /dev/null; then
  say "install chromium: the tests of the report open it"
  exit 1
fi
say "installing chromium"
as_root apt-get update -qq
DEBIAN_FRONTEND=noninteractive as_root apt-get -o DPkg::Lock::Timeout=300 \
  install -y -qq --no-install-recommends chromium > /dev/null
