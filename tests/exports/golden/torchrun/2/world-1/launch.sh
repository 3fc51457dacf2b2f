#!/bin/sh
# Made by Batchwright from recommendation rec_world_1.
# Effective batch 30: 1 rank x 5 steps of 6 samples.
# Verify the run (COMMAND starts it): batchwright verify recommendation.json -- COMMAND
set -eu
export BATCHWRIGHT_EFFECTIVE_BATCH_SIZE=30
export BATCHWRIGHT_WORLD_SIZE=1
export BATCHWRIGHT_MICRO_BATCH_SIZE=6
export BATCHWRIGHT_GRADIENT_ACCUMULATION_STEPS=5
exec torchrun \
  --nnodes=1 \
  --nproc-per-node=1 \
  --max-restarts=0 \
  --standalone \
  train.py \
  "$@"
