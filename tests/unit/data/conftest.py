"""Tokenizers that the tests of data share."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from tests.unit.data.tiny_tokenizers import build


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Without special tokens of its own, with a ChatML template."""
    return build()


@pytest.fixture(scope="session")
def llama_like() -> PreTrainedTokenizerFast:
    """Puts its first token before every text."""
    return build(prefix=True)
