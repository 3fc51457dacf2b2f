#!/bin/sh
# Made by Batchwright from recommendation rec_uneven.
# Effective batch 100: 3 rank(s) x 4 micro-batch(es) of 8 to 9 samples.
# The micro-batches are not all of one size: `batchwright verify` compares one repeated size, which exports to frameworks such as hugging-face have.
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
