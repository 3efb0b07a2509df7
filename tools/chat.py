"""Talk to adapters side by side on one backbone: every turn is answered by all of them, in one batch.

    python tools/chat.py --backbone DIR --run runs/first
    python tools/chat.py --backbone DIR --adapter terse=DIR --adapter polite=DIR --with-backbone
    python tools/chat.py --backbone DIR --run runs/first --tasks a,b --prompt "How are you?" --json

Adapters are those of a run (the directory of pretrain_mux.py --save) or directories in PEFT's format. Decoding is
greedy. Each adapter keeps its own conversation. In it, /reset begins anew, /only NAME[,NAME] has only these answer
(/only alone: all again), /help lists the commands, and /quit ends it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

from megatron_mux.arguments.parser import Parser
from megatron_mux.arguments.values import at_least, named_path, path
from megatron_mux.errors import UserError, exit_status, tell

if TYPE_CHECKING:
    from megatron_mux.chat.conversation import Answer, Conversation

PROGRAM = "chat.py"
_HELP = "/reset begins anew, /only NAME[,NAME] has only these answer, /quit ends the conversation"


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--backbone", type=path, required=True, metavar="DIR", help="Hugging Face directory")
    add(
        "--adapter",
        type=named_path,
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="an adapter in PEFT's format; may be given several times",
    )
    add("--run", type=path, metavar="DIR", help="directory of a run: its tasks' newest adapters")
    add("--tasks", type=_names, metavar="NAME,...", help="those of the run's tasks that answer (all)")
    add("--with-backbone", action="store_true", help="the backbone without an adapter answers, too")
    add("--max-new-tokens", type=at_least(1), default=128, metavar="N", help="tokens of an answer (128)")
    add("--plain", action="store_true", help="continue texts as they are, without the chat template")
    add("--prompt", metavar="TEXT", help="answer this and end")
    add("--json", action="store_true", help="print one JSON object (with --prompt)")
    add(
        "--backbone-dtype",
        choices=("nf4", "fp8", "int8"),
        help="how the weights of linear modules are quantised on load, as in the run (with --run: as it did)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="to compute in (the checkpoint's on a GPU, else float32)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Talk; returns 2 if the input is wrong."""
    return exit_status(lambda: run(build_parser().parse_args(argv)), PROGRAM)


def run(arguments: argparse.Namespace) -> None:
    """Talk, with a parsed command line."""
    if arguments.json and arguments.prompt is None:
        raise UserError("--json: needs --prompt TEXT: a conversation has no one object")
    if arguments.tasks is not None and arguments.run is None:
        raise UserError("--tasks: needs --run DIR, whose tasks they are")
    from megatron_mux.runtime import shutdown  # imports torch: seconds

    try:
        conversation = _begin(arguments)
        if arguments.prompt is None:
            _talk(conversation)
            return
        answers = conversation.ask(arguments.prompt)
        if arguments.json:
            found = [{"name": name, **asdict(answer)} for name, answer in answers.items()]
            print(json.dumps({"answers": found, "seconds": round(conversation.seconds, 3)}))
        else:
            _show(answers, conversation.seconds)
    finally:
        shutdown()


def _begin(arguments: argparse.Namespace) -> Conversation:
    """Check the adapters, then load the backbone."""
    import torch

    from megatron_mux.backbone.model import Backbone
    from megatron_mux.backbone.registry import read_backbone_info, stored_dtype
    from megatron_mux.chat.conversation import Conversation
    from megatron_mux.chat.speakers import quantisation_of, speakers_of
    from megatron_mux.data.tokenizer import load_tokenizer
    from megatron_mux.runtime import initialize

    quantise = arguments.backbone_dtype
    if quantise is None and arguments.run is not None:
        quantise = quantisation_of(arguments.run)
    info = read_backbone_info(arguments.backbone, quantise)
    info.check_parallel(1, 1)
    speakers = speakers_of(
        info, arguments.adapter, arguments.run, arguments.tasks, arguments.with_backbone, _warn
    )
    tokenizer = load_tokenizer(info.tokenizer)
    parallel = initialize()
    on_gpu = parallel.device.type == "cuda"
    name = arguments.dtype or (stored_dtype(arguments.backbone) if on_gpu else None)
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    backbone = Backbone.load(arguments.backbone, parallel, dtype, quantise=quantise)
    return Conversation(backbone, parallel, tokenizer, speakers, arguments.max_new_tokens, arguments.plain)


def _warn(text: str) -> None:
    print(f"{PROGRAM}: warning: {text}", file=sys.stderr)


def _talk(conversation: Conversation) -> None:
    """Read turns from standard input until it ends."""
    names = conversation.names
    print(f"{', '.join(names)}: {_HELP}")
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        command, _, rest = text.partition(" ")
        if command == "/quit":
            return
        if command == "/reset":
            conversation.reset()
        elif command == "/only":
            names = _only(conversation, rest, names)
        elif command.startswith("/"):
            print(_HELP)
        elif text:
            try:
                _show(conversation.ask(text, names), conversation.seconds)
            except UserError as error:
                tell(error, PROGRAM)


def _only(conversation: Conversation, rest: str, before: list[str]) -> list[str]:
    """Who answers from now on."""
    wanted = _names(rest) or conversation.names
    unknown = [name for name in wanted if name not in conversation.names]
    if unknown:
        print(f"nobody is called {', '.join(unknown)}: there are {', '.join(conversation.names)}")
        return before
    return wanted


def _show(answers: Mapping[str, Answer], seconds: float) -> None:
    """Print answers side by side."""
    from rich.columns import Columns
    from rich.panel import Panel
    from rich.text import Text

    from megatron_mux.console import make_console

    console = make_console()
    width = max(30, console.width // max(1, len(answers)) - 1)
    panels = [
        Panel(
            Text(answer.text.strip()),
            title=Text(name),
            title_align="left",
            width=width,
            subtitle=_ending(answer),
        )
        for name, answer in answers.items()
    ]
    console.print(Columns(panels))
    total = sum(answer.tokens for answer in answers.values())
    console.print(f"{total} tokens in {seconds:.2f} s", style="dim", highlight=False)


def _ending(answer: Answer) -> str | None:
    """Why an answer breaks off, if it does."""
    reasons = {"length": "cut at --max-new-tokens", "positions": "cut at the backbone's last position"}
    return reasons.get(answer.finish)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


if __name__ == "__main__":
    sys.exit(main())
