"""A client's run of its task: files are read once; each attempt joins the server and goes on from the newest save.

An attempt ends when the task is done, or when the server has lost steps: the next one begins at an earlier save, as a
process does that is started again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_mux import checkpoint, saved_files
from megatron_mux.adapters.ia3 import IA3Spec
from megatron_mux.adapters.peft_format import read_adapter
from megatron_mux.adapters.selection import value_of
from megatron_mux.adapters.targets import ALL_LINEAR, match_targets
from megatron_mux.arguments import MuxArguments
from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.registry import BackboneInfo
from megatron_mux.checkpoint import Manifest, SavedTask
from megatron_mux.data.dataset import DataFiles
from megatron_mux.data.tokenizer import load_tokenizer
from megatron_mux.engine import Task
from megatron_mux.errors import UserError
from megatron_mux.files import prepare_directory
from megatron_mux.library_log import keep_library_log
from megatron_mux.report import Reporter, cut_metrics
from megatron_mux.runtime import Parallel
from megatron_mux.section import shown
from megatron_mux.shape import BackboneShape
from megatron_mux.split.client.affinity import choose_server
from megatron_mux.split.client.backbone import SplitBackbone, load_ends
from megatron_mux.split.client.body_share import body_share
from megatron_mux.split.client.engine import SplitEngine
from megatron_mux.split.client.files import read_client_info
from megatron_mux.split.client.link import LOST, ServerConnection
from megatron_mux.split.client.options import ClientOptions
from megatron_mux.split.client.remote import Privacy, RemoteBody
from megatron_mux.split.client.request_sizes import request_sizes
from megatron_mux.split.client.run_privacy import privacy_of_run
from megatron_mux.split.client.run_record import name_run, note_run
from megatron_mux.split.protocol.agreement import NAMING_MODULES, NARROWING, Proposal, problem_of_training
from megatron_mux.split.protocol.wire import Limits, RefusedError
from megatron_mux.tasks import TaskSpec
from megatron_mux.tasks.life import TaskLife
from megatron_mux.training.loop_setup import make_loop
from megatron_mux.training.signals import stop_on_signals
from megatron_mux.training.task_setup import merge_saved, open_tasks

_SAVES_TO_RETURN_TO = 3
"""The server keeps its part of so many of the client's newest saves."""

_SAVE_INTERVALS = 10, 50
"""Least and most steps between saves, if nobody says: a tenth of the run's."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class ClientRun:
    """What a client's attempts have in common.

    Attributes:
        options: What the user asked for.
        info: The backbone, with the whole one's fingerprint.
        files: Opens data files.
        front, back: The client's layers.
        proposal: What the client asks the server for at step 0.
        privacy: Protects what is sent.
    """

    options: ClientOptions
    info: BackboneInfo
    task: Task
    files: DataFiles
    front: Backbone
    back: Backbone
    proposal: Proposal
    privacy: Privacy | None = None

    @classmethod
    def open(cls, options: ClientOptions, spec: TaskSpec, say: Say) -> ClientRun:
        """Read and check everything; nothing is written but the directory to save to.

        Raises:
            UserError: Something is wrong with it.
        """
        if wrong := problem_of_training(spec.training):
            raise UserError(f"task {spec.name!r}: {wrong}")
        info = read_client_info(options.backbone, options.cut_front, options.cut_back)
        if spec.adapter.own_rows(info.shape):
            raise UserError(
                f"task {spec.name!r}: adapter.modules_to_save and adapter.trainable_token_indices are not supported "
                "with a split server: leave them out, or train it with pretrain_mux.py"
            )
        files = DataFiles(load_tokenizer(info.tokenizer), say)
        source, manifest = _newest(options, info, spec.name, say)
        if options.load is not None and source is None:
            say(f"--load {options.load}: no checkpoint there yet, starting anew")
        (spec,) = merge_saved([spec], manifest)
        if spec.eval is not None and spec.eval.generates:
            raise UserError(
                "eval: generate, exact_match and rouge are not done in split fine-tuning: leave them out, and generate "
                "with megatron-mux chat from the adapter"
            )
        entry = _entry(manifest)
        saved = {} if entry is None else entry.spec["training"]
        for name in spec.training.length_fields if saved else ():
            before, now = saved[name], getattr(spec.training, name)
            if before != now:
                raise UserError(
                    f"task {spec.name!r}: training.{name}: {shown(now)}, not {shown(before)}: with a split server a "
                    "task keeps its number of steps: set it back, or give the task a new name"
                )
        (task,) = open_tasks([spec], info, files, say, {} if entry is None else {spec.name: entry})
        device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        alone = Parallel.alone(device)
        front, back = load_ends(info, alone, options.cut_front, options.cut_back, options.dtype)
        if options.save is None:
            say("no --save: the adapter will be lost when the run ends")
        elif problem := prepare_directory(options.save):
            raise UserError(problem)
        run = cls(options, info, task, files, front, back, _propose(options, info, task, source))
        if interval := run._saves()[0]:
            say(f"saving to {options.save} every {interval} steps; --load {options.save} goes on from there")
        return replace(run, privacy=privacy_of_run(options, task, say))

    @property
    def name(self) -> str:
        """The task's."""
        return self.task.spec.name

    def attempt(self, reporter: Reporter) -> None:
        """Join the server, train from the newest save to the end, and leave.

        Raises:
            RefusedError: The server does not go on; its code is `LOST` if it has lost steps.
            UserError: Something else is wrong.
        """
        options, say = self.options, reporter.say
        if log := keep_library_log(options.save and options.save / self.name):
            say(f"warnings of libraries go to {log}")
        source, manifest = _newest(options, self.info, self.name, say)
        entry = _entry(manifest)
        if entry is not None and entry.status in ("finished", "failed"):
            link = self._link(entry.step, say)  # never joined: there is nothing to compute
        else:
            link, manifest = self._join(source, manifest, say)
        try:
            if options.save is not None:
                note_run(options.save, self.name, self.proposal.run, options.identity)
            if link.is_joined and link.proposal.uploads:
                layers = self.proposal.body(self.info.shape)
                link.upload(body_share(self.task, self.info, layers, options.dtype))
            self._train(link, source or options.load, manifest, reporter)
        except RefusedError as error:
            if error.code == LOST:
                raise
            raise RefusedError(error.code, self._with_advice(error)) from None
        except UserError as error:
            raise UserError(self._with_advice(error)) from None
        finally:
            link.close()

    def _with_advice(self, error: UserError) -> str:
        """An error that ends the run, and how to go on after it."""
        steps, save = self._kept(), self.options.save
        if save is None or not steps:
            return str(error)
        return f"{str(error).rstrip('.')}. Step {max(steps)} is saved: --load {save} goes on from there."

    def go_back(self) -> int:
        """Cut the metrics to the newest save; returns its step, 0 if there is none."""
        _, manifest = _newest(self.options, self.info, self.name, lambda text: None)
        if self.options.save is not None:
            cut_metrics(self.options.save, manifest, self.name)
        return _step(manifest)

    # -- joining

    def _link(self, step: int, say: Say) -> ServerConnection:
        connect = self.options.connect or self._connect
        start = self.task.spec.adapter.adapter_name_or_path
        if start is not None and self.task.initial is None and not step:
            # It was not read for a run that is continued, which goes back to its beginning now.
            self.task.initial = read_adapter(start, self.task.spec.adapter, self.info.shape)
        uploads = self.task.initial is not None and not step
        changes = {"step": step, "incarnation": secrets.token_hex(16), "uploads": uploads}
        proposal = self.proposal.model_copy(update=changes)
        return ServerConnection(connect(say), proposal, self.front.shape, self.options.totals)

    def _connect(self, say: Say) -> Any:
        from megatron_mux.split.client.transport import Transport  # imports grpc

        tls = self.options.tls
        server, name = choose_server(self.options.server, f"{self.options.identity}/{self.name}")
        if tls is not None and name is not None:
            tls = replace(tls, server_name=tls.server_name or name)
        return Transport(server, tls, Limits(), say=say)

    def _join(
        self, source: Path | None, manifest: Manifest | None, say: Say
    ) -> tuple[ServerConnection, Manifest | None]:
        """Join at the newest save that the server has its part of; returns that save, None for the beginning.

        Raises:
            UserError: There are saves, and the server has its part of none of the newest ones.
        """
        newest, tries = manifest, 0
        while True:
            link = self._link(_step(manifest), say)
            try:
                link.join()
                break
            except RefusedError as error:
                link.close()
                if error.code != LOST or manifest is None or source is None:
                    raise
            except BaseException:
                link.close()
                raise
            tries += 1
            older = checkpoint.load(source, self.info.fingerprint, say, self.name, before=manifest.number)
            if older is None or tries == _SAVES_TO_RETURN_TO:
                raise UserError(
                    f"{self.name}: the server has its part of none of the newest saves in {source}: it is another "
                    "server, or its --save was removed. Give it that back, or begin anew with another --save."
                )
            manifest = older
        if manifest is not None and manifest is not newest and source is not None:
            say(
                f"{self.name}: the server has nothing of step {_step(newest)}: going back to step {_step(manifest)}"
            )
            if source == self.options.save:
                saved_files.drop_after(source, manifest.number, self.name)
        return link, manifest

    # -- training

    def _train(
        self, link: ServerConnection, load: Path | None, manifest: Manifest | None, reporter: Reporter
    ) -> None:
        options = self.options
        interval, keep = self._saves()
        layers = self.proposal.body(self.info.shape)
        trained = any(module.layer in layers for module in self.task.spec.adapter.modules(self.info.shape))
        remote = RemoteBody(link, trained, self.front.device, self.privacy)
        engine = SplitEngine(SplitBackbone(self.front, self.back, remote), self._kept)
        arguments = MuxArguments.with_defaults(
            backbone=self.info.path,
            save=options.save,
            load=load,
            save_interval=interval,
            mux_keep_checkpoints=keep,
            mux_rolling=False,  # a step takes so long that there is nothing to gain
            bf16=options.dtype == torch.bfloat16,
        )
        loop = make_loop(arguments, engine, reporter, self.info, self.files, manifest, lock=options.lock)
        link.give_up_if(lambda: loop.stopping)
        with closing(loop):
            try:
                loop.registry.register([replace(self.task, resume=None)])
                with stop_on_signals(loop):
                    loop.run()
            finally:
                for name in engine.tasks:  # the next attempt attaches it to the same layers
                    engine.remove_task(name)
        if link.is_joined:
            self._leave(link, loop.registry.lives[self.name], reporter.say)
        reporter.close()

    def _saves(self) -> tuple[int | None, int | None]:
        """Steps between saves besides those that the task asks for, and how many to keep."""
        options, training = self.options, self.task.spec.training
        asks = training.save_strategy is not None or training.save_steps is not None
        if options.save is None or options.save_interval is not None or asks:
            return options.save_interval, options.keep_checkpoints
        least, most = _SAVE_INTERVALS
        return (
            min(max(self.proposal.total_steps // 10, least), most),
            options.keep_checkpoints or _SAVES_TO_RETURN_TO,
        )

    def _kept(self) -> list[int]:
        """Steps that an attempt may begin at."""
        for directory in (self.options.save, self.options.load):
            if directory is not None:
                steps = saved_files.newest_steps(directory, self.name, _SAVES_TO_RETURN_TO, self.name)
                if steps:
                    return steps
        return []

    def _leave(self, link: ServerConnection, life: TaskLife, say: Say) -> None:
        """Tell the server that the client leaves; by then everything is saved."""
        try:
            link.leave(life.state == "finished")
        except UserError as error:
            say(f"{self.name}: could not take leave of the server: {error}")
        if not link.terms.returns_body:
            say(f"{self.name}: the body's part of the adapter stays on the server {self.options.server}")


def _newest(
    options: ClientOptions, info: BackboneInfo, name: str, say: Say
) -> tuple[Path | None, Manifest | None]:
    """The newest save of the run, or of the one that it continues, and its directory."""
    for directory in dict.fromkeys((options.save, options.load)):
        if directory is not None:
            manifest = checkpoint.load(directory, info.fingerprint, say, name)
            if manifest is not None:
                return directory, manifest
    return None, None


def _entry(manifest: Manifest | None) -> SavedTask | None:
    return None if manifest is None else manifest.tasks[0]


def _step(manifest: Manifest | None) -> int:
    """Steps that a save has done of the task."""
    entry = _entry(manifest)
    return entry.step if entry is not None and entry.checkpoint else 0


def _adapter_of(spec: TaskSpec, shape: BackboneShape) -> dict[str, Any]:
    """The task's `adapter` section as servers take it: modules listed, not matched; no path of this machine."""
    adapter: dict[str, Any] = {**spec.plain()["adapter"], "adapter_name_or_path": None}
    for name in NAMING_MODULES:
        given = adapter.get(name)
        if isinstance(given, str) and given.lower() != ALL_LINEAR:
            adapter[name] = [module.path for module in match_targets(given, shape.modules)]
    modules = spec.adapter.modules(shape)
    if any(adapter.get(name) not in (None, [], "") for name in NARROWING):
        adapter["target_modules"] = [module.path for module in modules if not module.experts]
        if isinstance(spec.adapter, IA3Spec):
            inputs = spec.adapter.scales_input(modules, shape)
            adapter["feedforward_modules"] = [module.path for module in inputs]
    adapter |= {name: None for name in NARROWING if name in adapter}
    for name, default in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        if adapter.get(name):
            given = adapter[name]
            adapter[name] = {m.path: value_of(given, m.path, adapter[default]) for m in modules}
    return adapter


def _propose(options: ClientOptions, info: BackboneInfo, task: Task, source: Path | None) -> Proposal:
    spec, sizes = task.spec, request_sizes(task)
    return Proposal(
        task=spec.name,
        run=name_run(source, spec.name),
        fingerprint=info.fingerprint,
        cut_front=options.cut_front,
        cut_back=options.cut_back,
        wire=options.wire,
        adapter=_adapter_of(spec, info.shape),
        training=spec.training,
        total_steps=spec.total_steps(len(task.data)),
        train_rows=sizes.train_rows,
        rows=sizes.rows,
        sequences=sizes.sequences,
        longest=sizes.longest,
        incarnation=secrets.token_hex(16),
    )
