"""The oracle: every task trained alone, with none of megatron_mux's adapters or engine."""
