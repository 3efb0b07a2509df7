"""What the reference of a DPO task costs, ours and TRL's.

python benchmarks/preference.py --output benchmarks/results/preference-cpu-2-cores.json     # minutes
python benchmarks/preference.py --backbone-shape tiny --rounds 2                            # to try it out

One LoRA task on the same pairs, four times: with the reference's rows in every step and with cached log-probabilities
(`precompute_ref_log_probs`), ours and TRL's. The four take turns, a step each, so that all see the same machine.
Lengths differ, as they do in real data: TRL pads the pairs of a batch to the longest.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from script import (
    add_machine,
    add_output,
    command_line,
    environment,
    in_turns,
    measured_on,
    publish,
    table,
)

WARM_UP_STEPS = 3
LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
SIDES = ("ours", "ours, cached", "TRL", "TRL, cached")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and publish."""
    parser = command_line(__doc__)
    parser.add_argument("--backbone-shape", choices=("tiny", "mid"), default="mid", help="a random backbone")
    parser.add_argument("--pairs", type=int, default=8, help="of a step")
    parser.add_argument(
        "--words", type=int, default=64, help="of the longest completion; the shortest has a quarter"
    )
    parser.add_argument("--rounds", type=int, default=12, help="steps of each side")
    add_machine(parser, device=False)
    add_output(parser)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        result = measure(arguments, Path(directory))
    publish(result, markdown(result), arguments.output)
    return 0


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Take steps of the four sides in turn."""
    import torch
    from workload import write_random_backbone

    from megatron_mux.runtime import initialize
    from tests.end_to_end.workplace import write_tokenizer

    torch.set_num_threads(arguments.threads)
    path = directory / "backbone"
    write_random_backbone(arguments.backbone_shape, path, torch.float32)
    write_tokenizer(path)
    records = _pairs(arguments)
    file = directory / "pairs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    parallel = initialize(device="cpu")
    makers: tuple[Callable[[bool], Callable[[], object]], ...] = (
        lambda cached: _ours(path, file, arguments, parallel, cached),
        lambda cached: _trl(path, records, arguments, directory, cached),
    )
    steps = [make(cached) for make in makers for cached in (False, True)]
    seconds = dict(zip(SIDES, in_turns(steps, arguments.rounds, WARM_UP_STEPS), strict=True))
    found = {name: statistics.median(own) for name, own in seconds.items()}
    return {
        **environment(arguments.backbone_shape, "float32", arguments.threads, packages=("trl",)),
        "pairs": arguments.pairs,
        "words": arguments.words,
        "rounds": arguments.rounds,
        "seconds": found,
        "all_seconds": seconds,
    }


def _pairs(arguments: argparse.Namespace) -> list[dict[str, str]]:
    chosen = random.Random(0)

    def words(least: int, most: int) -> str:
        return " ".join(f"w{chosen.randrange(90)}" for _ in range(chosen.randint(least, most)))

    most = arguments.words
    return [
        {
            "prompt": words(most // 4, most // 2),
            "chosen": f" {words(most // 4, most)}",
            "rejected": f" {words(most // 4, most)}",
        }
        for _ in range(arguments.pairs * 4)
    ]


def _ours(
    path: Path, file: Path, arguments: argparse.Namespace, parallel: Any, cached: bool
) -> Callable[[], object]:
    """A step of ours; each side has a backbone of its own."""
    from engine_bench import spec_of

    from megatron_mux.backbone.model import Backbone
    from megatron_mux.data.dataset import DataFiles
    from megatron_mux.data.tokenizer import load_tokenizer
    from megatron_mux.engine import Engine, Task

    length = 2 * arguments.words
    training = {"loss": "dpo", "precompute_ref_log_probs": cached}
    spec = spec_of("dpo", {"peft_type": "LORA", **LORA}, arguments.pairs, length, **training)
    data = DataFiles(load_tokenizer(path), print, file.parent / "cache").open(file, length, loss="dpo")
    engine = Engine(Backbone.load(path, parallel), parallel)
    engine.register_tasks([Task(spec, data)])
    return engine.step


def _trl(
    path: Path, records: list[dict[str, str]], arguments: argparse.Namespace, directory: Path, cached: bool
) -> Callable[[], None]:
    """A step of TRL's trainer, with its own data loader and optimizer."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    config = DPOConfig(
        output_dir=str(directory / "trl"),
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
        precompute_ref_log_probs=cached,
        per_device_train_batch_size=arguments.pairs,
        max_length=2 * arguments.words,
        train_sampling_strategy="sequential",
        max_steps=1_000_000,
    )
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, local_files_only=True),
        args=config,
        train_dataset=Dataset.from_list(records),
        processing_class=AutoTokenizer.from_pretrained(path, local_files_only=True),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA),  # type: ignore[arg-type]
    )
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()

    def forever() -> Any:
        while True:
            yield from trainer.get_train_dataloader()

    batches = forever()

    def step() -> None:
        trainer.training_step(trainer.model, next(batches))
        trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.model.zero_grad()

    return step


def markdown(result: dict[str, Any]) -> str:
    """The table."""
    seconds = result["seconds"]
    rows = []
    for side in ("ours", "TRL"):
        whole, cached = seconds[side], seconds[f"{side}, cached"]
        rows.append((side, f"{whole:.3f} s", f"{cached:.3f} s", f"{whole / cached:.2f}x"))
    faster = (f"{seconds[f'TRL{which}'] / seconds[f'ours{which}']:.2f}x" for which in ("", ", cached"))
    rows.append(("TRL / ours", *faster, ""))
    what = (
        f"One DPO task, {result['pairs']} pairs a step with completions of {result['words'] // 4} to "
        f"{result['words']} tokens, LoRA (r=8, attention); medians of {result['rounds']} steps, in turns."
    )
    headings = "side | step with the reference's rows | step with cached log-probabilities | cost"
    return "\n".join([measured_on(result), what, "", *table(headings, rows)])


if __name__ == "__main__":
    sys.exit(main())
