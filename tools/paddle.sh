#!/bin/sh
# Create .venv-paddle with PaddlePaddle's CPU wheel, for tests/platforms/test_paddle.py.
# PaddlePaddle needs a virtual environment of its own, without torch.
# Usage: tools/paddle.sh
# Set PYTHON to use another interpreter than .venv/bin/python. If the registry has no wheel for this
# Python, the script writes the reason to .venv-paddle/why-not, and the tests are skipped with it.
set -eu
cd -- "$(dirname -- "$0")/.."
[ ! -e .venv-paddle/ready ] || exit 0
python=${PYTHON:-.venv/bin/python}
output=$(mktemp)
trap 'rm -f "$output"' EXIT

printf 'paddle: installing PaddlePaddle into .venv-paddle (200 MB the first time)\n' >&2
rm -rf .venv-paddle
"$python" -m venv .venv-paddle
# PaddlePaddle imports setuptools, but its package does not require it.
if .venv-paddle/bin/pip install --quiet --disable-pip-version-check --only-binary=paddlepaddle \
  'paddlepaddle>=3.3,<4' setuptools > "$output" 2>&1; then
  touch .venv-paddle/ready
elif grep -q 'No matching distribution found for paddlepaddle' "$output"; then
  printf 'the registry has no wheel of PaddlePaddle for %s on %s\n' \
    "$("$python" --version)" "$(uname -m)" > .venv-paddle/why-not
  cat .venv-paddle/why-not >&2
else
  cat "$output" >&2
  exit 1
fi
