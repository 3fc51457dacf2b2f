# Made by Batchwright from recommendation rec_exact.
# Effective batch 64: 2 ranks x 4 steps of 8 samples.
# Verify the run (COMMAND starts it): batchwright verify recommendation.json -- COMMAND
# To be sourced by a bash script that then passes them on:
#   torchrun ... pretrain_gpt.py "${BATCH_ARGS[@]}" "${MODEL_ARGS[@]}" ...
unset PYTORCH_ALLOC_CONF
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
BATCH_ARGS=(
  --micro-batch-size=8
  --global-batch-size=64
  --clip-grad=1.0
  --seq-length=16
)
