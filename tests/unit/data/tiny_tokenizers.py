"""Tiny tokenizers, built here: nothing is downloaded."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXTS = ["hello world this is a test", "another test of the world, is it?", "yes", "no"] * 5


def build(chat_template: str | None = CHATML, **options: Any) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer; `suffix=True` makes it put its end token after every text, `prefix` its first."""
    suffix, prefix = options.pop("suffix", False), options.pop("prefix", False)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator(_TEXTS, trainer)
    if suffix or prefix:
        single = " ".join(["<s>"] * prefix + ["$A"] + ["</s>"] * suffix)
        backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(t, backend.token_to_id(t)) for t in ("<s>", "</s>")]
        )
    options = {"bos_token": "<s>", "eos_token": "</s>"} | options
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **options)
    tokenizer.chat_template = chat_template
    return tokenizer
