"""Make a small mixture of experts from the quickstart's backbone, with routing that is learned.

    python examples/moe/upcycle.py --output .quickstart/moe            # about a quarter of an hour on two cores
    python examples/moe/upcycle.py --output DIR --minutes 5 --layers 6 --experts 8

Keeps some layers of the backbone and trains them until they model the text again; fine-tunes a copy of their
feed-forward networks on each kind of text (reviews, glosses of nouns, novels, ...); makes these copies the experts of a
Mixtral with random routers; and trains routers and experts on all kinds, without a balancing loss. OUTPUT is then a
Hugging Face directory, with `routing.json`: what the routers have learned. An interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from routing import held_out, report, routing_of, with_random_routers
from safetensors.torch import load_file, save_file
from texts import Kind, read_kinds
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
Group = tuple[list[nn.Parameter], float]
"""Parameters and their learning rate."""

_HEAL, _EXPERTS, _ROUTERS = 0.38, 0.18, 0.44
"""Shares of the time: training the remaining layers, each kind's networks, and routers with experts."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="directory to write; must not exist yet")
    add("--backbone", type=Path, default=ROOT / ".quickstart/backbone", metavar="DIR", help="a Llama")
    add("--data", type=Path, default=ROOT / ".quickstart/data", metavar="DIR", help="the quickstart's data")
    add("--layers", type=int, default=8, metavar="L", help="layers to keep, evenly spaced (8)")
    add("--experts", type=int, default=12, metavar="E", help="experts of each layer (12)")
    add("--minutes", type=float, default=13.0, metavar="M", help="minutes of training, all together (13)")
    add("--steps", type=int, default=100_000, metavar="N", help="steps of each stage at most")
    add("--rows", type=int, default=4, metavar="N", help="sequences of a step (4)")
    add("--length", type=int, default=256, metavar="N", help="tokens of a sequence (256)")
    add("--seed", type=int, default=0)
    add("--tiny", action="store_true", help="to try it out: 2 layers, 4 experts, 2 steps of 2 x 16 tokens")
    arguments = parser.parse_args(argv)
    if arguments.tiny:
        arguments.layers, arguments.experts, arguments.steps = 2, 4, 2
        arguments.rows, arguments.length = 2, 16
    if arguments.output.exists():
        parser.error(f"--output {arguments.output}: exists already: choose another directory")
    if arguments.layers < 2 or arguments.experts < 2:
        parser.error("--layers and --experts must be at least 2")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Make the model and report; returns 2 if there is no backbone or data."""
    arguments = parse(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(arguments.seed)
    work = arguments.output.with_name(arguments.output.name + ".unfinished")
    try:
        tokenizer = AutoTokenizer.from_pretrained(arguments.backbone)
        dense = AutoModelForCausalLM.from_pretrained(arguments.backbone, dtype=torch.float32)
        kinds = read_kinds(arguments.data, tokenizer, arguments.length)[: arguments.experts]
        if len(kinds) < arguments.experts:
            raise ValueError(
                f"--experts {arguments.experts}: {arguments.data} has only {len(kinds)} kinds of text with "
                f"{arguments.length} tokens held out"
            )
        if not 2 <= arguments.layers <= dense.config.num_hidden_layers:
            raise ValueError(
                f"--layers {arguments.layers}: the backbone has {dense.config.num_hidden_layers}"
            )
    except (OSError, ValueError) as error:
        print(f"upcycle.py: {error}", file=sys.stderr)
        return 2
    _open(work, arguments)
    told = upcycle(dense, kinds, work, arguments)
    finish(work, arguments, tokenizer, told)
    return 0


def _open(work: Path, arguments: argparse.Namespace) -> None:
    """Make the directory of an unfinished run, or go on with one of the same command line."""
    work.mkdir(parents=True, exist_ok=True)
    file, own = work / "arguments.json", {name: str(value) for name, value in vars(arguments).items()}
    if file.exists() and json.loads(file.read_text(encoding="utf-8")) != own:
        say(f"{work} is of another command line: starting anew")
        shutil.rmtree(work)
        work.mkdir()
    file.write_text(json.dumps(own), encoding="utf-8")


def upcycle(dense: Any, kinds: list[Kind], work: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train in stages and save the model to `work / "model"`; returns what to tell of it."""
    text = held_out(kinds, 2, arguments.length)
    told: dict[str, Any] = {"kinds": [kind.name for kind in kinds]}
    whole = losses_of(dense, text)
    told["layers_kept"] = cut(dense, arguments.layers)
    without = losses_of(dense, text)
    train = Trainer(kinds, work, arguments)
    train.stage("heal", dense, [(_outside_embeddings(dense), 2e-3)], _HEAL)
    healed = losses_of(dense, text)
    perplexity = {"backbone": whole, "layers_left_out": without, "trained": healed}
    told["perplexity"] = {name: math.exp(loss) for name, loss in perplexity.items()}
    found = ", ".join(f"{name} {value:.1f}" for name, value in told["perplexity"].items())
    say(f"perplexity on held-out text: {found}")
    networks = [layer.mlp for layer in dense.model.layers]
    before = [{name: x.clone() for name, x in network.state_dict().items()} for network in networks]
    experts = []
    for kind in kinds:
        for network, state in zip(networks, before, strict=True):
            network.load_state_dict(state)
        own = [parameter for network in networks for parameter in network.parameters()]
        train.stage(f"expert-{kind.name}", dense, [(own, 1e-3)], _EXPERTS / len(kinds), [kind])
        experts.append(
            [{name: x.clone() for name, x in network.state_dict().items()} for network in networks]
        )
    model = assemble(dense, experts, arguments.seed)
    untrained = routing_of(model, text).loss
    gates = [layer.mlp.gate.weight for layer in model.model.layers]
    networks = [p for layer in model.model.layers for p in layer.mlp.experts.parameters()]
    # Routers start random: they need larger steps than weights that are trained already.
    train.stage("routers", model, [(gates, 2e-3), (networks, 5e-4)], _ROUTERS)
    told["loss_before_routers_are_trained"] = untrained
    model.to(torch.bfloat16)
    more = held_out(kinds, 6, arguments.length)
    names = list(more)
    told["routing"], table = report(
        routing_of(model, more), with_random_routers(model, more, arguments.seed), names
    )
    say(table)
    model.save_pretrained(work / "model")
    return told


def cut(dense: Any, layers: int) -> list[int]:
    """Keep evenly spaced layers of a model, the first and the last among them; returns which."""
    last = len(dense.model.layers) - 1
    kept = [round(i * last / (layers - 1)) for i in range(layers)]
    dense.model.layers = nn.ModuleList([dense.model.layers[i] for i in kept])
    for index, layer in enumerate(dense.model.layers):
        layer.self_attn.layer_idx = index
    dense.config.num_hidden_layers = layers
    return kept


def assemble(dense: Any, experts: list[list[dict[str, Tensor]]], seed: int) -> Any:
    """A Mixtral with the attention of `dense` and the experts [E][L], its routers random."""
    from transformers import MixtralConfig, MixtralForCausalLM

    old = dense.config.to_dict()
    fields = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "rms_norm_eps rope_parameters max_position_embeddings tie_word_embeddings bos_token_id "
        "eos_token_id pad_token_id"
    )
    config = MixtralConfig(
        **{name: old[name] for name in fields.split()},
        num_local_experts=len(experts),
        num_experts_per_tok=2,
        output_router_logits=False,
        sliding_window=None,
    )
    config._experts_implementation = (
        "grouped_mm"  # eager adds a tensor of all experts for each one to the gradient
    )
    model = MixtralForCausalLM(config)
    state = {name: x for name, x in dense.state_dict().items() if ".mlp." not in name}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all(".mlp." in name for name in missing), (missing, unexpected)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            layer.mlp.gate.weight.copy_(0.02 * torch.randn(layer.mlp.gate.weight.shape, generator=generator))
            for number, networks in enumerate(experts):
                own = networks[index]
                both = torch.cat((own["gate_proj.weight"], own["up_proj.weight"]))
                layer.mlp.experts.gate_up_proj[number].copy_(both)
                layer.mlp.experts.down_proj[number].copy_(own["down_proj.weight"])
    return model


def _outside_embeddings(model: Any) -> list[nn.Parameter]:
    fixed = model.get_input_embeddings().weight
    return [parameter for parameter in model.parameters() if parameter is not fixed]


@torch.no_grad()
def losses_of(model: Any, text: dict[str, Tensor]) -> float:
    """Nats per token on held-out text, mean over kinds."""
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        return sum(float(model(input_ids=x, labels=x, use_cache=False).loss) for x in text.values()) / len(
            text
        )


@dataclass
class Trainer:
    """Trains stages within their shares of the time, and keeps what each has trained.

    Attributes:
        kinds: All kinds of text.
        work: Directory for what stages trained.
        arguments: The command line.
    """

    kinds: list[Kind]
    work: Path
    arguments: argparse.Namespace

    def stage(
        self,
        name: str,
        model: Any,
        groups: Sequence[Group],
        share: float,
        kinds: list[Kind] | None = None,
    ) -> None:
        """Train parameters, or read them if an earlier run has trained them.

        Args:
            name: Of the stage.
            model: Returns a loss.
            groups: Those that are trained; all others stay as they are. Rates fall to zero on a half cosine.
            share: Of the minutes of the command line.
            kinds: Kinds of text to train on; None: all.
        """
        own = [parameter for parameters, _ in groups for parameter in parameters]
        file = self.work / f"{name}.safetensors"
        if file.exists():
            say(f"{name}: trained already")
            with torch.no_grad():
                for number, saved in load_file(file).items():
                    own[int(number)].copy_(saved)
            return
        model.requires_grad_(False)
        for parameter in own:
            parameter.requires_grad_(True)
        self._train(name, model, groups, share * 60 * self.arguments.minutes, kinds or self.kinds)
        new = file.with_suffix(".new")
        save_file({str(i): parameter.detach() for i, parameter in enumerate(own)}, new)
        os.replace(new, file)

    def _train(
        self, name: str, model: Any, groups: Sequence[Group], seconds: float, kinds: list[Kind]
    ) -> None:
        arguments = self.arguments
        generator = torch.Generator().manual_seed(arguments.seed)
        own = [parameter for parameters, _ in groups for parameter in parameters]
        listed = [{"params": parameters, "lr": rate} for parameters, rate in groups]
        optimizer = torch.optim.AdamW(listed, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        began, told, losses = time.monotonic(), 0.0, []
        model.train()
        for step in range(arguments.steps):
            passed = time.monotonic() - began
            if passed >= seconds:
                break
            done = max(passed / seconds, step / arguments.steps)
            part = min(1.0, (step + 1) / 8) * 0.5 * (1 + math.cos(math.pi * done))
            for group, (_, rate) in zip(optimizer.param_groups, groups, strict=True):
                group["lr"] = rate * part
            x = self._batch(kinds, generator)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=x, labels=x, use_cache=False).loss
            loss.backward()
            nn.utils.clip_grad_norm_(own, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if passed - told > 15:
                told = passed
                say(f"{name}: step {step + 1}, {done:.0%}, loss {sum(losses[-10:]) / len(losses[-10:]):.3f}")
        last = losses[-10:]
        say(
            f"{name}: {len(losses)} steps in {time.monotonic() - began:.0f} s, loss {sum(last) / max(1, len(last)):.3f}"
        )

    def _batch(self, kinds: list[Kind], generator: torch.Generator) -> Tensor:
        """[rows, length] int64, each row of a random kind."""
        drawn = torch.randint(len(kinds), (self.arguments.rows,), generator=generator).tolist()
        return torch.cat([kinds[i].batch(1, self.arguments.length, generator) for i in drawn])


def finish(work: Path, arguments: argparse.Namespace, tokenizer: Any, told: dict[str, Any]) -> None:
    """Move the finished model to its place and remove what the stages left."""
    folder = work / "model"
    tokenizer.save_pretrained(folder)
    (folder / "routing.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    os.replace(folder, arguments.output)
    shutil.rmtree(work)
    say(f"written: {arguments.output}")


def say(line: str) -> None:
    """Print a line of progress at once."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
