"""What a server reads from what its clients send, by cut and noise, and what the noise costs in accuracy.

python benchmarks/split_privacy.py --output benchmarks/results/split-privacy.json

The quickstart's sentiment task with LoRA on layers behind all cuts, so that the client trains nothing of its own and
the epsilon covers all that it sends. Tokens are recovered from the hidden states of reviews that were sent in training,
labels from the gradients of the same. Clipping norms are the medians of public texts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from script import add_output, command_line, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

_LONGEST = 24
_ADAPTED = range(18, 30)
_DELTA = 1e-5
_CLASSES = (" positive", " negative")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--backbone", type=Path, default=Path(".quickstart/backbone"), help="of the quickstart")
    add("--cuts", type=int, nargs="+", default=[1, 4, 16], metavar="N", help="layers in front (1 4 16)")
    add(
        "--noise", type=float, nargs="+", default=[0.0, 0.001, 0.003, 0.01, 0.03], metavar="X",
        help="noise multipliers (0 0.001 0.003 0.01 0.03)",
    )  # fmt: skip
    add("--steps", type=int, default=24, help="of training, 16 records each; 0: only attack (24)")
    add("--trained-cut", type=int, default=1, metavar="N", help="the cut whose accuracy is measured (1)")
    add("--records", type=int, default=8, help="that are attacked (8)")
    add("--threads", type=int, default=2)
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and publish."""
    arguments = parse(argv)
    if not (arguments.backbone / "config.json").is_file():
        print(
            f"--backbone {arguments.backbone}: there is no model: run make quickstart first", file=sys.stderr
        )
        return 2
    import torch

    torch.set_num_threads(arguments.threads)
    result = measure(arguments)
    publish(result, markdown(result), arguments.output)
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Attack every cut with every noise; train at one cut with each."""
    import torch
    from engine_bench import cpu_name
    from split_privacy_task import BATCH, SplitModel, read_public, read_reviews
    from transformers import AutoTokenizer

    from megatron_mux.split.accountant import Releases, epsilon_of

    tokenizer = AutoTokenizer.from_pretrained(arguments.backbone)
    data = arguments.backbone.parent / "data"
    reviews = read_reviews(tokenizer, data / "movie.jsonl", _LONGEST)
    held_out = read_reviews(tokenizer, data / "movie.eval.jsonl", _LONGEST)
    public = read_public(tokenizer, data, 6000)
    labels = torch.tensor([tokenizer(word)["input_ids"][0] for word in _CLASSES])
    steps = min(arguments.steps, len(reviews) // BATCH)
    releases = Releases.of_training(len(reviews[: steps * BATCH]) or BATCH, BATCH, max(1, steps))
    found = []
    for cut in arguments.cuts:
        norms = clipping_norms(SplitModel(arguments.backbone, cut, _ADAPTED, None), public)
        for noise in arguments.noise:
            epsilon = epsilon_of(noise, releases, _DELTA) if noise else None
            row = {"cut": cut, "noise": noise, "epsilon": epsilon}
            row |= attack(arguments.backbone, cut, noise, norms, reviews[: arguments.records], public, labels)
            if cut == arguments.trained_cut and steps:
                model = SplitModel(arguments.backbone, cut, _ADAPTED, _noise(noise, norms))
                model.train(reviews, steps)
                row["accuracy"] = model.accuracy(held_out, labels)
            found.append(row)
            print(row, file=sys.stderr, flush=True)
    before = SplitModel(arguments.backbone, 1, _ADAPTED, None).accuracy(held_out, labels) if steps else None
    sizes = {"records": arguments.records, "held_out": len(held_out), "steps": steps, "batch": BATCH}
    return {"hardware": cpu_name(), "delta": _DELTA, "accuracy_before": before, **sizes, "rows": found}


def clipping_norms(model: Any, public: Sequence[Any]) -> tuple[float, float]:
    """The median Frobenius norms of public texts' hidden states and of their gradients."""
    from split_privacy_task import BATCH, Record

    texts = [Record(text[:_LONGEST], _LONGEST - 2) for text in public if len(text) >= _LONGEST][:BATCH]
    model.loss(texts, 0).backward()
    parts = [part.reshape(len(texts), -1).norm(dim=1).tolist() for part in (model.sent, model.returned)]
    return statistics.median(parts[0]), statistics.median(parts[1])


def _noise(multiplier: float, norms: tuple[float, float]) -> Any:
    from megatron_mux.split.accountant import Releases
    from megatron_mux.split.noise import Noise, Privacy

    if not multiplier:
        return None
    privacy = Privacy(
        clip_activations=norms[0], clip_gradients=norms[1], noise_multiplier=multiplier, delta=_DELTA
    )
    return Noise(privacy, bytes(32), Releases(1, 1))


def attack(
    backbone: Path,
    cut: int,
    noise: float,
    norms: tuple[float, float],
    records: Sequence[Any],
    public: Sequence[Any],
    labels: Any,
) -> dict[str, float]:
    """Recover the records' tokens and labels from what a client sends of them in its first step."""
    import torch
    from split_privacy_task import SplitModel
    from transformers import AutoModelForCausalLM

    from megatron_mux.split.reconstruction import TokenAttack, recover_labels

    known = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32).eval()
    client = SplitModel(backbone, cut, _ADAPTED, _noise(noise, norms))
    client.loss(records, 0).backward()
    lengths = [len(record.tokens) for record in records]
    attacker = TokenAttack(known, cut, public, noise * norms[0])
    right, right_of_reviews = [], []
    for sent, record in zip(client.sent.detach().split(lengths), records, strict=True):
        same = attacker.recover(sent) == record.tokens
        right.append(same)
        right_of_reviews.append(same[record.review])
    rows = [
        sum(lengths[:i]) + record.prompt - 1 for i, record in enumerate(records)
    ]  # where the label is predicted
    wanted = torch.stack([record.tokens[record.prompt] for record in records])
    told = recover_labels(known, client.last[rows], client.returned[rows], noise * norms[1], labels)
    return {
        "tokens": float(torch.cat(right).float().mean()),
        "review_tokens": float(torch.cat(right_of_reviews).float().mean()),
        "labels": float((told == wanted).float().mean()),
    }


def markdown(result: dict[str, Any]) -> str:
    """The table."""
    rows = [
        (
            row["cut"],
            f"{row['noise']:g}",
            "none" if row["epsilon"] is None else f"{row['epsilon']:.3g}",
            f"{100 * row['tokens']:.0f}%",
            f"{100 * row['review_tokens']:.0f}%",
            f"{100 * row['labels']:.0f}%",
            f"{100 * row['accuracy']:.1f}%" if "accuracy" in row else "",
        )
        for row in result["rows"]
    ]
    before = result["accuracy_before"]
    head = (
        f"Two classes; {result['records']} records attacked; epsilon at delta {result['delta']:g}, one release of each "
        f"record's activations and one of its gradients. Accuracy of {result['held_out']} held-out reviews after "
        f"{result['steps']} steps of {result['batch']} records"
        + (f", before: {100 * before:.1f}%" if before is not None else "")
        + f". {result['hardware']}."
    )
    names = "cut | noise | epsilon | tokens recovered | of the review | labels recovered | accuracy"
    return "\n".join([head, "", *table(names, rows)])


if __name__ == "__main__":
    sys.exit(main())
