#!/usr/bin/env bash
# Fine-tune the tasks of one file on two nodes: start it on both. The same commands again continue the run.
# Usage: NODE_RANK=0 MASTER_ADDR=HOST BACKBONE=DIR TASKS=FILE SAVE=DIR bash examples/launch/two_nodes.sh [flags]
#        On the other node NODE_RANK=1, everything else alike; HOST is the node of rank 0.
# BACKBONE, TASKS, the data and SAVE have to be the same files on both nodes: a shared file system.
set -euo pipefail
repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

NNODES="${NNODES:-2}"
NODE_RANK="${NODE_RANK:?0 on the node that MASTER_ADDR names, 1 on the other}"
MASTER_ADDR="${MASTER_ADDR:?host name or address of the node of rank 0}"
MASTER_PORT="${MASTER_PORT:-29500}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
TP="${TP:-1}"
PP="${PP:-2}"  # tensor ranks are neighbours, stages far apart: TP stays within a node, two stages are on one node each
SAVE="${SAVE:-runs/two-nodes}"

DISTRIBUTED_ARGS=(
    --nnodes "$NNODES"
    --nproc-per-node "$GPUS_PER_NODE"
    --node-rank "$NODE_RANK"
    --master-addr "$MASTER_ADDR"
    --master-port "$MASTER_PORT"
)
# shellcheck source=arguments.sh
source "$repository/examples/launch/arguments.sh"

exec "${PYTHON_BIN:-python}" -m torch.distributed.run "${DISTRIBUTED_ARGS[@]}" \
    "$repository/pretrain_mux.py" "${MODEL_PARALLEL_ARGS[@]}" "${MUX_ARGS[@]}" "$@"
