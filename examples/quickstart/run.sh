#!/usr/bin/env bash
# Fine-tune the four tasks of tasks.yaml over a two-stage pipeline: two processes, on CPU cores or on two GPUs.
# Usage: PYTHON_BIN=.venv/bin/python bash examples/quickstart/run.sh [flags for pretrain_mux.py]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python="${PYTHON_BIN:-python}"
stages=2
if gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') && [ "$gpus" -eq 1 ]; then
    stages=1  # two processes cannot share one GPU
fi

# Each call keeps what it learned in a folder of its own.
run=.quickstart/run number=1
while [ -e "$run" ]; do
    number=$((number + 1))
    run=".quickstart/run-$number"
done

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error
if [ -z "${OMP_NUM_THREADS:-}" ]; then
    cores=$(getconf _NPROCESSORS_ONLN)
    OMP_NUM_THREADS=$((cores / stages > 0 ? cores / stages : 1))
    export OMP_NUM_THREADS
fi

dtype="${QUICKSTART_DTYPE:-auto}"
case "$dtype" in
    auto | fp32 | bf16) ;;
    *)
        echo "QUICKSTART_DTYPE=$dtype: must be auto, fp32 or bf16" >&2
        exit 2
        ;;
esac
if [ "$dtype" = auto ]; then
    dtype=$("$python" examples/quickstart/fastest_dtype.py)
    echo "The backbone runs in $dtype: measured to be the faster one here (QUICKSTART_DTYPE=fp32 or bf16 decides otherwise)."
fi
if [ "$dtype" = bf16 ]; then set -- --bf16 "$@"; else set -- --mux-fp32 "$@"; fi

start=$SECONDS
"$python" -m torch.distributed.run --standalone --nproc-per-node "$stages" \
    pretrain_mux.py --pipeline-model-parallel-size "$stages" \
    --backbone .quickstart/backbone --mux-tasks examples/quickstart/tasks.yaml --save "$run" "$@"
echo
echo "Trained in $((SECONDS - start)) s. Adapters, in PEFT's format: $run/TASK/checkpoint-STEP"
echo "Picture of the schedule: $run/schedule.svg"
