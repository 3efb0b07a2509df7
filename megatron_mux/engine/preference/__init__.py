"""Tasks that learn a preference between completions: their losses, references, and held-out figures."""
