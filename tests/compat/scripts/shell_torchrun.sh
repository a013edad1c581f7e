#!/bin/bash
# A platform's entry script: one process a node calls torchrun with the variables that it finds: many README files of LLM trainers.
set -e
torchrun --nnodes "$WORLD_SIZE" --node-rank "$RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --nproc-per-node 2 \
  sub_rank.py "$@"
