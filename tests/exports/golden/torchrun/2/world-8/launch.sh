#!/bin/sh
# Made by Batchwright from recommendation rec_world_8.
# Effective batch 128: 8 ranks x 4 steps of 4 samples.
# Verify the run (COMMAND starts it): batchwright verify recommendation.json -- COMMAND
set -eu
unset PYTORCH_ALLOC_CONF
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
: "${MASTER_ADDR:?set it to the name or address of the first node, the same on every node}"
exec torchrun \
  --nnodes=2 \
  --nproc-per-node=4 \
  --max-restarts=0 \
  --rdzv-backend=c10d \
  --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}" \
  --rdzv-id="gpt-small" \
  --rdzv-conf="join_timeout=1800,read_timeout=600" \
  src/train.py \
  --per_device_train_batch_size=4 \
  --gradient_accumulation_steps=4 \
  --dataloader_drop_last=true \
  --bf16=false \
  --fp16=false \
  --max_grad_norm=0.0 \
  --activation_checkpointing=true \
  --optim=adamw_torch \
  --learning_rate=0.001 \
  --weight_decay=0.0 \
  --adam_beta1=0.9 \
  --adam_beta2=0.999 \
  --lr_scheduler_type=constant \
  --warmup_steps=0 \
  "$@"
