"""What a server of split fine-tuning reads from its clients, and what noise against that costs.

python benchmarks/split_privacy.py --output FILE.json     # a quarter of an hour on two quiet cores

The quickstart's sentiment task on SmolLM2-135M, reviews of at most 24 tokens. LoRA on the last layers, so that the
client trains none of its own and epsilon covers all that it sends. Of the attacks, `tokens` is the share of the
reviews' own tokens that are recovered, `labels` that of the sentiments, among all tokens of the vocabulary and among
the two words. Norms are clipped to the median of public texts. Accuracy is that of the two words on held-out reviews,
whose hidden states get the same noise. In a second table the client's layers have a LoRA that the server does not know,
trained without noise. With --output, a call that was ended goes on where it stopped.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from script import add_machine, add_output, command_line, publish, table
from sitting import Kept

if TYPE_CHECKING:
    from split_privacy_task import Record, SplitModel

    from benchmarks.token_attack import TokenAttack

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run by file path, from a checkout

DELTA = 1e-5
LONGEST = 24
ADAPTED = 12
"""Last layers with LoRA."""
PUBLIC_TOKENS = 4000
"""Of each of the two public texts."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--prepared", type=Path, default=ROOT / ".quickstart", help="what `make prepare` wrote"
    )
    parser.add_argument("--cuts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--multipliers", type=float, nargs="+", default=[0, 0.001, 0.01, 0.03, 2.0])
    parser.add_argument("--steps", type=int, default=24, help="of each training, with 16 reviews each")
    parser.add_argument("--attacked", type=int, default=12, help="reviews whose tokens are to be recovered")
    parser.add_argument("--labelled", type=int, default=48, help="reviews whose labels are to be recovered")
    add_machine(parser, device=False)
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Attack, train, and publish."""
    arguments = parse(argv)
    with tempfile.TemporaryDirectory() as directory:
        about = {key: value for key, value in vars(arguments).items() if key not in ("prepared", "output")}
        about |= {"delta": DELTA, "hardware": hardware(arguments.threads)}
        empty = {"cpu_s": 0.0, "before": {}, "clip": {}, "cells": {}, "front": {}}
        kept = Kept(arguments.output or Path(directory, "kept.json"), about, empty)
        Study(arguments, kept).run()
    result = {"about": about, **kept.found}
    publish(result, markdown(result), arguments.output)
    return 0


class Study:
    """All attacks and trainings; what `kept` has already is not done again."""

    def __init__(self, arguments: argparse.Namespace, kept: Kept) -> None:
        import torch
        from split_privacy_task import read_public, read_reviews
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(arguments.threads)
        self.arguments, self.kept = arguments, kept
        self.backbone, data = arguments.prepared / "backbone", arguments.prepared / "data"
        tokenizer = AutoTokenizer.from_pretrained(self.backbone)
        self.reviews = read_reviews(tokenizer, data / "movie.jsonl", LONGEST)
        self.held_out = read_reviews(tokenizer, data / "movie.eval.jsonl", LONGEST)
        self.public = read_public(tokenizer, data, PUBLIC_TOKENS)
        self.labels = torch.tensor([tokenizer(word)["input_ids"][0] for word in (" negative", " positive")])
        self.model = AutoModelForCausalLM.from_pretrained(self.backbone, dtype=torch.float32).eval()
        self.layers = range(self.model.config.num_hidden_layers)
        self._counted = time.process_time()

    def run(self) -> None:
        """Do what is left, cut by cut."""
        from benchmarks.token_attack import TokenAttack

        found, front = self.kept.found, None
        if not found["clip"]:
            found["clip"] = self._norms()
            accuracy = self._split(self.arguments.cuts[0], None).accuracy(self.held_out, self.labels)
            found["before"] = {"accuracy": accuracy, "held_out": len(self.held_out)}
        for cut in self.arguments.cuts:
            names = [f"{cut} {multiplier:g}" for multiplier in self.arguments.multipliers]
            if str(cut) in found["front"] and all(name in found["cells"] for name in names):
                continue
            attack = TokenAttack(self.model, cut, self.public)
            for name, multiplier in zip(names, self.arguments.multipliers, strict=True):
                if name not in found["cells"]:
                    self._keep("cells", name, self._cell(attack, cut, multiplier))
            if str(cut) not in found["front"]:
                front = front or self._trained_front()
                self._keep("front", str(cut), self._front(attack, cut, front))

    def _keep(self, part: str, name: str, value: dict[str, Any]) -> None:
        self.kept.found[part][name] = value
        self.kept.found["cpu_s"] += time.process_time() - self._counted
        self._counted = time.process_time()
        self.kept.keep()
        print(part, name, value, file=sys.stderr, flush=True)

    def _norms(self) -> dict[str, float]:
        """Median norms of public texts of the same length, whose last two tokens have labels."""
        import torch
        from split_privacy_task import BATCH, Record

        texts = [text[:LONGEST] for text in self.public if len(text) >= LONGEST]
        records = [Record(text, LONGEST - 2) for text in texts[:BATCH] + texts[-BATCH:]]
        norms: dict[str, list[float]] = {}
        for cut in self.arguments.cuts:
            split = self._split(cut, None)
            for start in range(0, len(records), BATCH):
                split.loss(records[start : start + BATCH], 0).backward()
                for name, rows in (str(cut), split.sent), ("gradients", split.returned):
                    norms.setdefault(name, []).extend(
                        float(record.detach().norm()) for record in torch.split(rows, LONGEST)
                    )
        return {name: statistics.median(values) for name, values in norms.items()}

    def _split(self, cut: int, noise: Any) -> SplitModel:
        from split_privacy_task import SplitModel

        return SplitModel(self.backbone, cut, self.layers[-ADAPTED:], noise)

    def _cell(self, attack: TokenAttack, cut: int, multiplier: float) -> dict[str, Any]:
        """Attack what is sent in the first steps, then train."""
        from megatron_mux.split.privacy.accountant import Releases, epsilon_of
        from megatron_mux.split.privacy.noise import Noise, Privacy

        clip = self.kept.found["clip"]
        releases = Releases.of_training(len(self.reviews), 16, self.arguments.steps)
        noise = None
        if multiplier:
            section = Privacy(
                clip_activations=clip[str(cut)],
                clip_gradients=clip["gradients"],
                noise_multiplier=multiplier,
                delta=DELTA,
            )
            noise = Noise(section, bytes(range(32)), releases)  # a benchmark needs no secret
        split = self._split(cut, noise)
        tokens, *labels = self._attack(
            attack, split, multiplier * clip[str(cut)], multiplier * clip["gradients"]
        )
        cell = {"epsilon": epsilon_of(multiplier, releases, DELTA) if multiplier else None, "tokens": tokens}
        cell |= {"labels": labels[0], "labels_of_two": labels[1], "accuracy": self._accuracy(split)}
        return cell

    def _attack(
        self, attack: TokenAttack, split: SplitModel, noise: float, gradient_noise: float
    ) -> tuple[float, float, float]:
        """The shares of tokens, of labels, and of labels among the two words that are recovered."""
        from split_privacy_task import BATCH

        from benchmarks.token_attack import recover_labels

        reviews = self.reviews[: self.arguments.labelled]
        tokens: list[bool] = []
        right: tuple[list[bool], list[bool]] = ([], [])
        for step, start in enumerate(range(0, len(reviews), BATCH)):
            batch = reviews[start : start + BATCH]
            split.loss(batch, step).backward()
            lengths = [len(review.tokens) for review in batch]
            parts = (rows.detach().split(lengths) for rows in (split.sent, split.last, split.returned))
            for number, (review, sent, last, returned) in enumerate(zip(batch, *parts, strict=True), start):
                if number < self.arguments.attacked:
                    tokens += _recovered(attack, review, sent, noise)
                row = slice(review.prompt - 1, review.prompt)  # where the label is predicted
                for among, hits in zip((None, self.labels), right, strict=True):
                    found = recover_labels(self.model, last[row], returned[row], gradient_noise, among)
                    hits.append(bool(found == review.tokens[review.prompt]))
        return statistics.mean(tokens), statistics.mean(right[0]), statistics.mean(right[1])

    def _accuracy(self, split: SplitModel) -> float:
        """Of a training. Without noise, the cut does not matter to it."""
        first = f"{self.arguments.cuts[0]} 0"
        if split.noise is None and first in self.kept.found["cells"]:
            return float(self.kept.found["cells"][first]["accuracy"])
        split.model.zero_grad()
        split.train(self.reviews, self.arguments.steps)
        return split.accuracy(self.held_out, self.labels)

    def _trained_front(self) -> Any:
        """A model whose client's layers have learnt, too."""
        from split_privacy_task import SplitModel

        split = SplitModel(self.backbone, self.arguments.cuts[0], self.layers, None)
        split.train(self.reviews, self.arguments.steps)
        return split.join()

    def _front(self, attack: TokenAttack, cut: int, front: Any) -> dict[str, Any]:
        """Attack hidden states of layers with an adapter that the server does not know."""
        import torch

        tokens, changes = [], []
        for review in self.reviews[: self.arguments.attacked]:
            with torch.no_grad():
                sent, plain = (
                    model(review.tokens[None], output_hidden_states=True).hidden_states[cut][0]
                    for model in (front.model, self.model.model)
                )
            tokens += _recovered(attack, review, sent, 0.0)
            changes.append(float(((sent - plain).norm(dim=1) / plain.norm(dim=1)).mean()))
        return {"tokens": statistics.mean(tokens), "change": statistics.mean(changes)}


def _recovered(attack: TokenAttack, review: Record, sent: Any, noise: float) -> list[bool]:
    """Whether each token of the review itself is recovered."""
    right: list[bool] = (attack.recover(sent, noise) == review.tokens)[review.review].tolist()
    return right


def hardware(threads: int) -> str:
    """Describe the machine."""
    from importlib.metadata import version

    from megatron_mux.fusion.device import cpu_name

    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"{cpu_name()}, {threads} threads, {libraries}"


def markdown(result: dict[str, Any]) -> str:
    """Render both tables."""
    rows, before = [], result["before"]
    for name, cell in result["cells"].items():
        cut, multiplier = name.split()
        shares = (cell[key] for key in ("tokens", "labels", "labels_of_two", "accuracy"))
        epsilon = "none" if cell["epsilon"] is None else f"{cell['epsilon']:,.3g}"
        rows.append((cut, multiplier, epsilon, *(f"{share:.1%}" for share in shares)))
    headings = (
        "layers before the cut | noise multiplier | epsilon | tokens | labels | labels of two | accuracy"
    )
    front = [(cut, f"{cell['change']:.1%}", f"{cell['tokens']:.1%}") for cut, cell in result["front"].items()]
    about = (
        f"{result['about']['hardware']}; {result['cpu_s'] / 60:.0f} minutes of processor time. "
        f"Epsilon at delta {DELTA:g}. "
        f"Accuracy of {before['held_out']} reviews, {before['accuracy']:.1%} before training."
    )
    lines = [
        about,
        "",
        *table(headings, rows),
        "",
        "A LoRA on the client's layers, which the server does not know; no noise:",
        "",
        *table("layers before the cut | change of hidden states | tokens", front),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
