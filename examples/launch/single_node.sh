#!/usr/bin/env bash
# Fine-tune the tasks of one file on the GPUs of one node. The same command again continues the run.
# Usage: BACKBONE=DIR TASKS=FILE SAVE=DIR bash examples/launch/single_node.sh [flags, such as --bf16]
set -euo pipefail
repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
TP="${TP:-1}"
PP="${PP:-1}"  # GPUS_PER_NODE / (TP x PP) replicas divide each step's sequences
SAVE="${SAVE:-runs/single-node}"

DISTRIBUTED_ARGS=(
    --standalone
    --nproc-per-node "$GPUS_PER_NODE"
)
# shellcheck source=arguments.sh
source "$repository/examples/launch/arguments.sh"

exec "${PYTHON_BIN:-python}" -m torch.distributed.run "${DISTRIBUTED_ARGS[@]}" \
    "$repository/pretrain_mux.py" "${MODEL_PARALLEL_ARGS[@]}" "${MUX_ARGS[@]}" "$@"
