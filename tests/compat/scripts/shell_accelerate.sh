#!/bin/bash
# The same with accelerate launch: huggingface/accelerate, examples/slurm/submit_multigpu.sh.
set -e
accelerate launch --multi_gpu --num_processes $((WORLD_SIZE * 2)) --num_machines "$WORLD_SIZE" --machine_rank "$RANK" \
  --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" --mixed_precision no --dynamo_backend no sub_rank.py "$@"
