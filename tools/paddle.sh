#!/bin/sh
# Makes .venv-paddle with PaddlePaddle's CPU wheel, which wants an environment of its own beside torch: tests/platforms/test_paddle.py uses it.
# Use: tools/paddle.sh   (PYTHON names another interpreter than the one of .venv)
# Where the registry has no wheel for this Python, .venv-paddle/why-not says so, and the tests that need it are skipped with that reason.
set -eu
cd -- "$(dirname -- "$0")/.."
[ ! -e .venv-paddle/ready ] || exit 0
python=${PYTHON:-.venv/bin/python}
said=$(mktemp)
trap 'rm -f "$said"' EXIT

printf 'paddle: installing PaddlePaddle into .venv-paddle (200 MB the first time)\n' >&2
rm -rf .venv-paddle
"$python" -m venv .venv-paddle
# It imports setuptools without asking for it.
if .venv-paddle/bin/pip install --quiet --disable-pip-version-check --only-binary=paddlepaddle 'paddlepaddle>=3.3,<4' setuptools > "$said" 2>&1; then
  touch .venv-paddle/ready
elif grep -q 'No matching distribution found for paddlepaddle' "$said"; then
  printf 'the registry has no wheel of PaddlePaddle for %s on %s\n' "$("$python" --version)" "$(uname -m)" > .venv-paddle/why-not
  cat .venv-paddle/why-not >&2
else
  cat "$said" >&2
  exit 1
fi
