#!/bin/sh
# One worker for each of 4 parts. On each of NODES hosts: NODES=2 HOST0=host0 NODE_RANK=0 sh torchrun.sh    (NODE_RANK=1 on the other)
torchrun --nnodes "${NODES:-1}" --nproc-per-node "${WORKERS:-$((4 / ${NODES:-1}))}" --node-rank "${NODE_RANK:-0}" \
    --master-addr "${HOST0:-127.0.0.1}" --master-port "${PORT:-29500}" \
    "$(dirname "$0")/train.py" "$@"
