#!/bin/sh
# Made by Batchwright from recommendation rec_exact.
# Effective batch 64: 2 ranks x 4 steps of 8 samples.
# Verify the run (COMMAND starts it): batchwright verify recommendation.json -- COMMAND
set -eu
unset PYTORCH_ALLOC_CONF
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export BATCHWRIGHT_EFFECTIVE_BATCH_SIZE=64
export BATCHWRIGHT_WORLD_SIZE=2
export BATCHWRIGHT_MICRO_BATCH_SIZE=8
export BATCHWRIGHT_GRADIENT_ACCUMULATION_STEPS=4
export ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4
exec accelerate launch --config_file accelerate.yaml train.py "$@"
