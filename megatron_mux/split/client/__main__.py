"""Fine-tune a task whose data, labels, first and last layers stay here, through a server that has the body.

    python -m megatron_mux.split.client --backbone DIR --tasks tasks.yaml --server HOST:PORT \
        --tls-dir DIR --client NAME --save DIR

The same in Python: `SplitTrainer`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_mux.arguments.parser import BACKBONE, Parser
from megatron_mux.arguments.values import at_least, model, path
from megatron_mux.errors import UserError, tell
from megatron_mux.gpus import set_allocator_options
from megatron_mux.library_log import LibraryLog, quiet_imports

if TYPE_CHECKING:
    from megatron_mux.split.privacy.noise import Privacy
    from megatron_mux.split.tls import ClientTls
    from megatron_mux.tasks import TaskSpec

PROGRAM = "megatron_mux.split.client"


def build_parser(program: str = "python -m megatron_mux.split.client") -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(
        prog=program,
        description=(__doc__ or "").partition("\n")[0],
        epilog="Batch size, learning rate, steps and data are the task's own: see tasks.yaml.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("task").add_argument
    add("--tasks", type=path, required=True, metavar="FILE", help="tasks.yaml")
    add("--task", metavar="NAME", help="the task to train, if the file has several")
    add = parser.add_argument_group("backbone").add_argument
    add(
        "--backbone",
        type=model,
        required=True,
        metavar="DIR",
        help=f"{BACKBONE}, or what `megatron-mux split-export` made of one",
    )
    add(
        "--cut-front",
        type=at_least(0),
        default=1,
        metavar="N",
        help="first layers that stay here, 1 or more (1)",
    )
    add("--cut-back", type=at_least(0), default=1, metavar="N", help="last layers that stay here (1)")
    add("--bf16", action="store_true", help="compute them in bfloat16 (default: fp32)")
    add("--device", choices=("cpu", "cuda"), help="where to compute them (default: a GPU if there is one)")
    add = parser.add_argument_group("server").add_argument
    add(
        "--server",
        required=True,
        metavar="HOST:PORT",
        help="its address; of several (with commas between, or by a name with several addresses) the task's own",
    )
    add("--tls-dir", type=path, metavar="DIR",
        help="what megatron_mux.split.certificates made, instead of the three files")  # fmt: skip
    add("--client", metavar="NAME", help="this client's name in DIR")
    add("--tls-ca", type=path, metavar="FILE", help="CA that signed the server's certificate (DIR/ca.pem)")
    add("--tls-cert", type=path, metavar="FILE", help="certificate that names this client (DIR/NAME.pem)")
    add("--tls-key", type=path, metavar="FILE", help="its private key (DIR/NAME.key)")
    add(
        "--tls-server-name",
        metavar="NAME",
        help="name in the server's certificate, if the address has another",
    )
    add("--wire", choices=("f32", "bf16", "f16", "i8"), default="f32", help="dtype of what is sent (f32)")
    _add_privacy(parser)
    _add_results(parser)
    return parser


def _add_privacy(parser: Parser) -> None:
    add = parser.add_argument_group("privacy (docs/split-privacy.md)").add_argument
    norm = "Frobenius norm to which a record's %s are clipped before noise is added"
    add("--clip-activations", type=float, metavar="C", help=norm % "hidden states")
    add("--clip-gradients", type=float, metavar="C", help=norm % "gradients")
    add("--noise-multiplier", type=float, metavar="X", help="standard deviation of the noise, relative to C")
    add("--target-epsilon", type=float, metavar="E", help="instead: the epsilon that the whole run may spend")
    add("--delta", type=float, metavar="D", help="delta of (epsilon, delta)")


def _add_results(parser: Parser) -> None:
    add = parser.add_argument_group("results").add_argument
    add(
        "--save",
        type=path,
        metavar="DIR",
        help="write adapter and metrics to DIR/TASK; clients with other tasks may share DIR",
    )
    add(
        "--load",
        type=path,
        metavar="DIR",
        help="continue the run saved in DIR (an empty DIR starts a new run)",
    )
    add(
        "--break-lock",
        action="store_true",
        help="take over a task's directory that a dead process has locked",
    )
    add("--save-interval", type=at_least(1), metavar="N",
        help="save every N steps, besides at the end (a tenth of the run, from 10 to 50)")  # fmt: skip
    add("--keep-checkpoints", type=at_least(1), metavar="N",
        help="saves to keep (all; without --save-interval, 3)")  # fmt: skip
    add("--log-interval", type=at_least(1), default=10, metavar="N", help="log every N steps (10)")
    add("--tensorboard-dir", type=path, metavar="DIR", help="write TensorBoard files to DIR")
    add("--no-progress", action="store_true", help="no live display")


def choose_task(file: Path, name: str | None) -> TaskSpec:
    """The task of a task file that a client trains.

    Args:
        name: The task's; None: the file has only one.

    Raises:
        UserError: The file is wrong, or does not have that task.
    """
    from megatron_mux.tasks import load_task_file

    tasks = {task.name: task for task in load_task_file(file, data_later=True)}
    if name is None and len(tasks) == 1:
        return next(iter(tasks.values()))
    if name is None:
        raise UserError(f"--tasks {file}: has {len(tasks)} tasks, and a client trains one: add --task NAME")
    if name not in tasks:
        raise UserError(f"--task {name}: {file} has {', '.join(tasks)}")
    return tasks[name]


def privacy_of(arguments: argparse.Namespace) -> Privacy | None:
    """Clipping and noise as the flags ask for; None without any of them.

    Raises:
        UserError: A flag is missing, or has no sense.
    """
    from pydantic import ValidationError

    from megatron_mux.split.privacy.noise import Privacy

    names = ("clip_activations", "clip_gradients", "noise_multiplier", "target_epsilon", "delta")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if not given:
        return None
    try:
        return Privacy.model_validate(given)
    except ValidationError as error:
        problems = []
        for each in error.errors():
            where = "".join(f"--{str(part).replace('_', '-')}: " for part in each["loc"])
            missing = "is missing: noise needs it" if each["type"] == "missing" else each["msg"]
            problems.append(f"{where or 'privacy: '}{missing}")
        raise UserError(*problems) from None


def tls_of(arguments: argparse.Namespace) -> ClientTls:
    """Files of TLS as the flags name them.

    Raises:
        UserError: One is not named, or not there.
    """
    from megatron_mux.split.tls import ClientTls

    ca, certificate, key = arguments.tls_ca, arguments.tls_cert, arguments.tls_key
    if arguments.tls_dir is not None and arguments.client is not None:
        made = ClientTls.of(arguments.tls_dir, arguments.client)
        ca, certificate, key = ca or made.ca, certificate or made.certificate, key or made.key
    if ca is None or certificate is None or key is None:
        raise UserError("--tls-dir DIR --client NAME, or --tls-ca, --tls-cert and --tls-key, must be given")
    for flag, file in (("--tls-ca", ca), ("--tls-cert", certificate), ("--tls-key", key)):
        if not file.is_file():
            raise UserError(
                f"{flag} {file}: no such file: python -m megatron_mux.split.certificates makes it"
            )
    return ClientTls(ca, certificate, key, arguments.tls_server_name)


def train(arguments: argparse.Namespace) -> None:
    """Train the task that a parsed command line asks for.

    Raises:
        UserError: The input is wrong, or the server does not serve.
    """
    task, tls = choose_task(arguments.tasks, arguments.task), tls_of(arguments)
    privacy = privacy_of(arguments)
    set_allocator_options()
    quiet_imports()
    import torch

    from megatron_mux.split.client.trainer import SplitTrainer
    from megatron_mux.split.tls import split_address

    for address in arguments.server.split(","):
        split_address(address.strip())  # before the run leaves anything behind
    SplitTrainer(
        backbone=arguments.backbone,
        task=task,
        server=arguments.server,
        tls=tls,
        cut_front=arguments.cut_front,
        cut_back=arguments.cut_back,
        save=arguments.save,
        load=arguments.load,
        break_lock=arguments.break_lock,
        save_interval=arguments.save_interval,
        keep_checkpoints=arguments.keep_checkpoints,
        log_interval=arguments.log_interval,
        tensorboard_dir=arguments.tensorboard_dir,
        privacy=privacy,
        wire=arguments.wire,
        dtype=torch.bfloat16 if arguments.bf16 else torch.float32,
        device=arguments.device,
        progress=not arguments.no_progress,
    ).train()


def main(argv: Sequence[str] | None = None, program: str | None = None) -> int:
    """Parse the command line and train.

    Returns:
        Exit status: 0; 2 if the input is wrong or the server does not serve; 130 after an interrupt before training.
    """
    try:
        arguments = (build_parser(program) if program else build_parser()).parse_args(argv)
        with LibraryLog(wanted=not arguments.no_progress):
            train(arguments)
    except UserError as error:
        tell(error, program or PROGRAM)
        return 2
    except KeyboardInterrupt:  # while the task trains, the loop takes signals: it saves first
        print(f"{program or PROGRAM}: interrupted: the task was not training", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
