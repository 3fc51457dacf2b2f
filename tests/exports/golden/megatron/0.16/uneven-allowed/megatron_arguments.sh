# Made by Batchwright from recommendation rec_uneven.
# Effective batch 96: 3 ranks x 4 steps of 8 samples.
# The effective batch becomes 96 instead of 100 (-4): 3 ranks that repeat one size cannot reach 100.
# Verify the run (COMMAND starts it): batchwright verify recommendation.json --format megatron -- COMMAND
# To be sourced by a bash script that then passes them on:
#   torchrun ... pretrain_gpt.py "${BATCH_ARGS[@]}" "${MODEL_ARGS[@]}" ...
unset PYTORCH_ALLOC_CONF
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
BATCH_ARGS=(
  --micro-batch-size=8
  --global-batch-size=96
  --clip-grad=0.0
  --seq-length=16
)
