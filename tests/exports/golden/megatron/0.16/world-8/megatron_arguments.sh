# Made by Batchwright from recommendation rec_world_8.
# Effective batch 128: 8 ranks x 4 steps of 4 samples.
# Verify the run (COMMAND starts it): batchwright verify recommendation.json -- COMMAND
# To be sourced by a bash script that then passes them on:
#   torchrun ... pretrain_gpt.py "${BATCH_ARGS[@]}" "${MODEL_ARGS[@]}" ...
unset PYTORCH_ALLOC_CONF
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
BATCH_ARGS=(
  --micro-batch-size=4
  --global-batch-size=128
  --clip-grad=0.0
  --seq-length=16
  --recompute-granularity=full
  --recompute-method=uniform
  --recompute-num-layers=1
)
