"""Talk to adapters side by side on one backbone: every turn is answered by all of them, in one batch.

    megatron-mux chat --backbone DIR --run runs/first
    megatron-mux chat --backbone DIR --adapter terse=DIR --adapter polite=DIR --with-backbone
    megatron-mux chat --backbone DIR --run runs/first --tasks a,b --prompt "How are you?" --json

Adapters are those of a run (the directory of its --save) or directories in PEFT's format. Decoding is
greedy. Each adapter keeps its own conversation. In it, /reset begins anew, /only NAME[,NAME] has only these answer
(/only alone: all again), /help lists the commands, and /quit ends it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from megatron_mux.arguments.flag import COUNT, DIRECTORY, MODEL
from megatron_mux.arguments.parser import ADAPTER, BACKBONE, Parser
from megatron_mux.arguments.values import named_path
from megatron_mux.errors import UserError, exit_status, tell, to_stderr

if TYPE_CHECKING:
    from megatron_mux.chat.conversation import Answer, Conversation

PROGRAM = "megatron-mux chat"
_HELP = "/reset begins anew, /only NAME[,NAME] has only these answer, /quit ends the conversation"


def build_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = Parser(prog=program, description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--backbone", **MODEL, required=True, help=BACKBONE)
    add(
        "--adapter",
        type=named_path,
        action="append",
        default=[],
        metavar="[NAME=]DIR",
        help=f"an adapter, {ADAPTER}; may be given several times",
    )
    add("--run", **DIRECTORY, help="directory of a run: its tasks' newest adapters")
    add("--tasks", type=_names, metavar="NAME,...", help="those of the run's tasks that answer (all)")
    add("--with-backbone", action="store_true", help="the backbone without an adapter answers, too")
    add("--max-new-tokens", **COUNT, default=128, help="tokens of an answer (128)")
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


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Talk; returns 2 if the input is wrong."""
    return exit_status(lambda: run(build_parser(program).parse_args(argv), program), program)


def run(arguments: argparse.Namespace, program: str) -> None:
    """Talk, with a parsed command line."""
    if arguments.json and arguments.prompt is None:
        raise UserError("--json: needs --prompt TEXT: a conversation has no one object")
    if arguments.tasks is not None and arguments.run is None:
        raise UserError("--tasks: needs --run DIR, whose tasks they are")
    from megatron_mux.runtime import shutdown  # imports torch: seconds

    try:
        conversation = _begin(arguments, program)
        if arguments.prompt is None:
            _talk(conversation, program)
            return
        answers = conversation.ask(arguments.prompt)
        if arguments.json:
            lines = [{"name": name, **asdict(answer)} for name, answer in answers.items()]
            print(json.dumps({"answers": lines, "seconds": round(conversation.seconds, 3)}))
        else:
            _show(answers, conversation.seconds)
    finally:
        shutdown()


def _begin(arguments: argparse.Namespace, program: str) -> Conversation:
    """Check the adapters, then load the backbone."""
    import torch

    from megatron_mux.backbone.model import Backbone
    from megatron_mux.backbone.registry import read_backbone_info, stored_dtype
    from megatron_mux.chat.conversation import Conversation
    from megatron_mux.chat.speakers import quantisation_of, speakers_of
    from megatron_mux.data.tokenizer import load_tokenizer
    from megatron_mux.runtime import initialize
    from megatron_mux.saved_files import find_adapter

    quantise = arguments.backbone_dtype
    if quantise is None and arguments.run is not None:
        quantise = quantisation_of(arguments.run)
    info = read_backbone_info(arguments.backbone, quantise)
    info.check_parallel(1, 1)
    adapters = [(name, find_adapter(path, to_stderr)) for name, path in arguments.adapter]

    speakers = speakers_of(
        info,
        adapters,
        arguments.run,
        arguments.tasks,
        arguments.with_backbone,
        warn=lambda text: to_stderr(f"{program}: warning: {text}"),
    )
    tokenizer = load_tokenizer(info.tokenizer)
    parallel = initialize()
    on_gpu = parallel.device.type == "cuda"
    name = arguments.dtype or (stored_dtype(arguments.backbone) if on_gpu else None)
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    backbone = Backbone.load(arguments.backbone, parallel, dtype, quantise=quantise)
    return Conversation(backbone, parallel, tokenizer, speakers, arguments.max_new_tokens, arguments.plain)


def _talk(conversation: Conversation, program: str) -> None:
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
                tell(error, program)


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
