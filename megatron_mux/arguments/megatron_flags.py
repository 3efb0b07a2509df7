"""Flags of Megatron-LM's training scripts that are not supported, and what to use instead. Data only."""

from __future__ import annotations

from collections.abc import Mapping

_TRAINING = {
    "training.learning_rate": "lr",
    "training.lr_scheduler_type": "lr-decay-style lr-wsd-decay-style min-lr lr-decay-iters lr-decay-samples "
    "lr-wsd-decay-iters lr-wsd-decay-samples decoupled-lr decoupled-min-lr",
    "training.warmup_steps": "lr-warmup-iters lr-warmup-samples lr-warmup-init warmup",
    "training.warmup_ratio": "lr-warmup-fraction",
    "training.max_steps or training.num_train_epochs": "train-iters train-samples",
    "training.per_device_train_batch_size": "micro-batch-size batch-size",
    "training.per_device_train_batch_size and training.gradient_accumulation_steps": "global-batch-size "
    "rampup-batch-size step-batch-size-schedule decrease-batch-size-if-needed",
    "training.weight_decay": "weight-decay start-weight-decay end-weight-decay weight-decay-incr-style",
    "training.max_grad_norm": "clip-grad",
    "training.router_aux_loss_coef": "moe-aux-loss-coeff moe-router-load-balancing-type",
    "training.optim": "optimizer sgd-momentum",
    "training.adam_beta1": "adam-beta1 lion-beta1",
    "training.adam_beta2": "adam-beta2 lion-beta2",
    "training.adam_epsilon": "adam-eps",
    "data.path": "data-path train-data-path data-args-path per-split-data-args-path",
    "data.max_length": "seq-length decoder-seq-length encoder-seq-length",
    "data.shuffle": "dataloader-type",
    "eval.path": "valid-data-path test-data-path split",
    "eval.eval_steps": "eval-interval eval-iters start-eval-at-iter",
    "eval.per_device_eval_batch_size": "eval-micro-batch-size eval-global-batch-size",
}

PER_TASK: Mapping[str, str] = {f"--{flag}": key for key, flags in _TRAINING.items() for flag in flags.split()}
"""Flags for what each task sets for itself, and the key of tasks.yaml that sets it."""

_FROM_BACKBONE = """
apply-layernorm-1p apply-residual-connection-post-layernorm glu-linear-offset
make-vocab-size-divisible-by no-position-embedding no-rope-freq openai-gelu
qk-l2-norm quick-geglu relative-attention-max-distance
relative-attention-num-buckets rope-scaling-factor rope-type rotary-interleaved rotary-percent
rotary-scaling-factor rotary-seq-len-interpolation-factor softmax-type squared-relu use-rope-scaling
use-rotary-position-embeddings window-attn-skip-freq window-size
"""
_TOKENIZER = """
merge-file tokenizer-metadata tokenizer-type vocab-file chat-template tiktoken-pattern
trust-remote-code
"""
_UNTRAINED = "init-method-std init-method-xavier-uniform embedding-init-method-std data-parallel-random-init"
_SHARDING = "use-torch-fsdp2 use-megatron-fsdp use-custom-fsdp data-parallel-sharding-strategy"

REASONS: Mapping[str, str] = {
    **{
        f"--{flag}": "describes the model, which --backbone defines: remove it"
        for flag in _FROM_BACKBONE.split()
    },
    **{
        f"--{flag}": "the tokenizer is the one in --backbone, or in --tokenizer-model: remove it"
        for flag in _TOKENIZER.split()
    },
    **{
        f"--{flag}": "the backbone's weights are loaded, not initialized: remove it"
        for flag in _UNTRAINED.split()
    },
    **{
        f"--{flag}": "adapters are small, only frozen weights are sharded: use --mux-backbone-weights sharded"
        for flag in _SHARDING.split()
    },
    "--cpu-offloading-num-layers": "all layers are offloaded or none: use --mux-backbone-weights offloaded",
    "--fp16": "fp16 is not supported: use --bf16",
    "--pretrained-checkpoint": "use --backbone DIR",
    "--finetune": "the backbone is always read and frozen: use --backbone DIR, and remove this flag",
    "--ckpt-step": "--load takes the newest complete save of a run: remove it",
    "--num-experts": "is read from the backbone: remove it",
    "--use-distributed-optimizer": "adapters are small, their optimizer is not sharded: remove it",
    "--overlap-grad-reduce": "only adapters have gradients, reduced once a step: remove it",
    "--overlap-param-gather": "only adapters have an optimizer, and it is not sharded: remove it",
    "--recompute-modules": "what a granularity recomputes is fixed: remove it",
    "--no-save-optim": "a save always holds what an exact resume needs: remove it",
    "--no-save-rng": "a save always holds what an exact resume needs: remove it",
    "--no-load-optim": "to start from an adapter alone, use adapter.adapter_name_or_path in tasks.yaml",
    "--no-load-rng": "to start from an adapter alone, use adapter.adapter_name_or_path in tasks.yaml",
    "--persistent-save-interval": "use --save-interval",
    "--save-retain-interval": "use --mux-keep-checkpoints",
    "--model-parallel-size": "use --tensor-model-parallel-size",
    "--checkpoint-activations": "use --recompute-granularity full",
    "--recompute-activations": "use --recompute-granularity selective",
    "--local-rank": "start the processes with torchrun",
    "--account-for-embedding-in-pipeline-split": "layers are divided by cost, including the embedding: remove it",
    "--account-for-loss-in-pipeline-split": "layers are divided by cost, including the loss: remove it",
    "--wandb-project": "is per task: training.report_to and training.project in tasks.yaml",
}
"""Flags of Megatron that are not supported, and what to do instead, where there is advice to give."""
