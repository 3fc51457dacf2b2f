#!/bin/sh
# Made by Batchwright from recommendation rec_uneven.
# Effective batch 96: 3 ranks x 4 steps of 8 samples.
# The effective batch becomes 96 instead of 100 (-4): 3 ranks that repeat one size cannot reach 100.
# Verify the run (COMMAND starts it): batchwright verify recommendation.json --format accelerate -- COMMAND
set -eu
unset PYTORCH_ALLOC_CONF
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export BATCHWRIGHT_EFFECTIVE_BATCH_SIZE=96
export BATCHWRIGHT_WORLD_SIZE=3
export BATCHWRIGHT_MICRO_BATCH_SIZE=8
export BATCHWRIGHT_GRADIENT_ACCUMULATION_STEPS=4
export ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4
exec accelerate launch --config_file accelerate.yaml train.py "$@"
