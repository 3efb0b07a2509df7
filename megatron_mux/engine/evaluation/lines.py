"""Lines that tell people what an evaluation found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from megatron_mux.engine.evaluation.evaluator import EvalResult

_LONGEST_TEXT = 80
"""Characters of a text that is shown."""
_LIKELIHOODS = ("loss", "perplexity", "kl", "nll_loss", "log_odds_ratio", "log_odds_chosen")


def eval_lines(name: str, step: int, result: EvalResult) -> Iterator[str]:
    """Yield a line of figures, one for each note, and one for each sample.

    Args:
        name: Of the task.
        step: Its optimizer steps so far.
        result: What was found.
    """
    figures = " ".join(
        f"{key.replace('_', ' ')} {_figure(key, value)}" for key, value in result.values.items()
    )
    yield f"{name}: step {step} eval {figures}"
    for note in result.notes:
        yield f"{name}: {note}"
    for sample in result.samples:
        yield f"{name}: " + ", ".join(f"{what} {_short(text)}" for what, text in asdict(sample).items())


def _figure(name: str, value: float) -> str:
    """Likelihoods and rewards as they are, shares in percent."""
    plain = name in _LIKELIHOODS or ("/" in name and not name.endswith("accuracies"))
    return f"{value:.4f}" if plain else f"{value:.1%}"


def _short(text: str) -> str:
    """A text in quotes, its middle left out if it is long: prompts differ at their ends."""
    if len(text) > _LONGEST_TEXT:
        text = f"{text[: _LONGEST_TEXT // 2]} ... {text[-_LONGEST_TEXT // 2 :]}"
    return json.dumps(text, ensure_ascii=False)
