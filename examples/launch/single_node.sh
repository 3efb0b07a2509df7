#!/usr/bin/env bash
# Fine-tune the tasks of one file on the GPUs of one node. The same command again continues the run.
# Usage: BACKBONE=DIR TASKS=FILE SAVE=DIR bash examples/launch/single_node.sh [flags, such as --bf16]
set -euo pipefail
repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
TP="${TP:-1}"
PP="${PP:-1}"  # GPUS_PER_NODE / (TP x PP) replicas divide each step's sequences
BACKBONE="${BACKBONE:-$repository/.quickstart/backbone}"
TASKS="${TASKS:-$repository/examples/quickstart/tasks.yaml}"
SAVE="${SAVE:-runs/single-node}"

# On SIGTERM the run finishes its step and saves; torchrun would kill it after 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-100}"

DISTRIBUTED_ARGS=(
    --standalone
    --nproc-per-node "$GPUS_PER_NODE"
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
)
MUX_ARGS=(
    --backbone "$BACKBONE"
    --mux-tasks "$TASKS"
    --save "$SAVE"
    --load "$SAVE"  # where nothing is saved yet, the run starts anew
    --save-interval "${SAVE_INTERVAL:-100}"
)

exec "${PYTHON_BIN:-python}" -m torch.distributed.run "${DISTRIBUTED_ARGS[@]}" \
    "$repository/pretrain_mux.py" "${MODEL_PARALLEL_ARGS[@]}" "${MUX_ARGS[@]}" "$@"
