#!/usr/bin/env bash
# Create .venv with the packages of an extra of pyproject.toml.
# Install Debian's venv package if it is missing.
# Usage: tools/setup.sh [demo|dev]
# demo installs torch and what the example imports; dev, the default, installs what the tests need too.
# Set PYTHON to use another interpreter than python3.
set -euo pipefail
cd -- "$(dirname -- "$0")/.."
python=${PYTHON:-python3}
extra=${1:-dev}

say() { printf 'setup: %s\n' "$1" >&2; }

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  say "$python is missing or older than Python 3.10; PYTHON=/path/to/python names another"
  exit 1
fi
if ! "$python" -c 'import ensurepip, venv' 2> /dev/null; then
  say "installing $python's venv module"
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  as_root apt-get update -qq
  as_root apt-get install -y -qq "python$version-venv" > /dev/null
fi

[ -x .venv/bin/python ] || "$python" -m venv .venv
say "installing clusterjob, torch and more into .venv (minutes the first time)"
.venv/bin/pip install --disable-pip-version-check --progress-bar off --constraint constraints.txt \
  --editable ".[$extra]" |
  sed -un -e 's/^ *\(Downloading\|Using cached\) \([^ ]*\) (\(.*\)).*/setup: \1 \2, \3/p' \
    -e 's#^ *Processing .*/\([^/ ]*\.whl\).*#setup: Reading \1#p' \
    -e 's/^Installing collected packages: .*/setup: Installing these packages/p' >&2
touch .venv/demo
[ "$extra" = demo ] || touch .venv/ready
