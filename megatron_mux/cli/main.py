"""`megatron-mux COMMAND`: finds the command's module and calls its `main`."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_mux.version import __version__


class Command(NamedTuple):
    """A command: the module whose `main(argv, program)` runs it, and its line in `--help`."""

    module: str
    summary: str


COMMANDS: Mapping[str, Command] = {
    "train": Command("megatron_mux.cli.train", "train the tasks of a file on one backbone"),
    "plan": Command("megatron_mux.cli.plan", "plan how tasks share steps, ranks and memory"),
    "estimate": Command("megatron_mux.cli.estimate", "predict peak memory, and which parallel method fits"),
    "profile": Command("megatron_mux.cli.profile", "measure a backbone's operators, for plans"),
    "draw": Command("megatron_mux.cli.draw", "draw a run's schedule, predicted above measured"),
    "convert": Command("megatron_mux.cli.convert", "convert a model from or to a Megatron checkpoint"),
    "chat": Command("megatron_mux.cli.chat", "talk to several adapters side by side"),
    "merge": Command("megatron_mux.cli.merge", "merge an adapter into its backbone"),
    "combine": Command("megatron_mux.cli.combine", "combine several LoRA adapters into one"),
    "export": Command("megatron_mux.cli.export", "export an adapter to GGUF, for llama.cpp"),
    "profile-experts": Command("megatron_mux.cli.profile_experts", "count which experts tasks select"),
    "measure-topology": Command("megatron_mux.cli.measure_topology", "measure links between processes"),
    "place-experts": Command("megatron_mux.cli.place_experts", "place experts on workers by their use"),
    "serve": Command("megatron_mux.cli.serve", "serve fine-tuning jobs over OpenAI's API"),
    "serve-admin": Command("megatron_mux.cli.serve_admin", "the tenants, keys and backups of such a service"),
    "serve-instance": Command(
        "megatron_mux.cli.serve_instance", "an engine of such a service, which starts it"
    ),
    "split-server": Command("megatron_mux.split.server.__main__", "serve a backbone's body to split clients"),
    "split-client": Command("megatron_mux.split.client.__main__", "train a task through a split server"),
    "split-certificates": Command("megatron_mux.split.certificates", "make certificates for both"),
    "split-export": Command("megatron_mux.split.export_client", "export the layers a split client needs"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; 2 if there is no such command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    name, *rest = words
    if name == "--version":
        print(f"megatron-mux {__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "--help lists all commands"
        print(f"megatron-mux: {name}: unknown command: {hint}", file=sys.stderr)
        return 2
    module = importlib.import_module(COMMANDS[name].module)
    status: int = module.main(rest, f"megatron-mux {name}")
    return status


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: megatron-mux COMMAND [flags]",
            "",
            "Fine-tune many PEFT tasks at once on one frozen backbone.",
            "",
            *lines,
            "",
            "megatron-mux COMMAND --help lists the command's flags.",
        ]
    )
