# What every launch script passes to pretrain_mux.py; sourced by them once their variables are set.

# On SIGTERM the run finishes its step and saves; torchrun would kill it after 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-100}"

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
)
MUX_ARGS=(
    --backbone "${BACKBONE:-$repository/.quickstart/backbone}"
    --mux-tasks "${TASKS:-$repository/examples/quickstart/tasks.yaml}"
    --save "$SAVE"
    --load "$SAVE"  # where nothing is saved yet, the run starts anew
    --save-interval "${SAVE_INTERVAL:-100}"
)
