# Made by Batchwright from recommendation rec_world_1.
# Effective batch 30: 1 rank x 5 steps of 6 samples.
# Verify the run (COMMAND starts it): batchwright verify recommendation.json -- COMMAND
# To be sourced by a bash script that then passes them on:
#   torchrun ... pretrain_gpt.py "${BATCH_ARGS[@]}" "${MODEL_ARGS[@]}" ...
BATCH_ARGS=(
  --micro-batch-size=6
  --global-batch-size=30
  --clip-grad=0.0
  --seq-length=16
)
