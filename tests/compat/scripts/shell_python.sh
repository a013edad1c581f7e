#!/bin/bash
# A wrapper around python: cd, exports, exec: every cluster's train.sh.
set -euo pipefail
export TOKENIZERS_PARALLELISM=false
exec python sub_rank.py "$@"
