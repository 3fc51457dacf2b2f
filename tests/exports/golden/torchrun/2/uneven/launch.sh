#!/bin/sh
# Made by Batchwright from recommendation rec_uneven.
# Effective batch 100: 3 ranks x 4 steps of 8 to 9 samples.
# `batchwright verify` cannot check this export, because its micro-batches differ in size; it can check the Hugging Face export.
set -eu
unset PYTORCH_ALLOC_CONF
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export BATCHWRIGHT_EFFECTIVE_BATCH_SIZE=100
export BATCHWRIGHT_WORLD_SIZE=3
export BATCHWRIGHT_MICRO_BATCH_SIZE=9
export BATCHWRIGHT_GRADIENT_ACCUMULATION_STEPS=4
exec torchrun \
  --nnodes=1 \
  --nproc-per-node=3 \
  --max-restarts=0 \
  --standalone \
  train.py \
  "$@"
