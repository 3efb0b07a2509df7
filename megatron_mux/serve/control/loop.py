"""The control loop: looks after instances, asks the dispatcher, and has its decisions carried out.

The database says which instance has which job. A turn of the loop brings instances in line with that, so that nothing
depends on a message that was lost, or on a server that was killed between two steps.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from megatron_mux.serve.channel.hub import Hub, Peer
from megatron_mux.serve.channel.messages import TOKEN_VARIABLE, Drain, Message, Submit
from megatron_mux.serve.channel.messages import Leave as LeaveCommand
from megatron_mux.serve.control.observed import Observed
from megatron_mux.serve.control.reports import JobRecords, add_event, end_lease, fail
from megatron_mux.serve.control.results import write_results
from megatron_mux.serve.database.ids import hash_of
from megatron_mux.serve.database.store import Store
from megatron_mux.serve.database.tables import Instance, Job
from megatron_mux.serve.dispatcher.decide import plan
from megatron_mux.serve.dispatcher.decisions import Decision, Fail, Launch, Leave, Retire, Start, Wait
from megatron_mux.serve.dispatcher.forecast import Forecast
from megatron_mux.serve.dispatcher.policies import Fair, Fifo, Policy
from megatron_mux.serve.dispatcher.suspects import blame
from megatron_mux.serve.executor.executor import Executor
from megatron_mux.serve.executor.executor import Launch as LaunchedInstance
from megatron_mux.serve.settings import Settings

_log = logging.getLogger(__name__)

SILENCE_SECONDS = 5.0
"""An instance that was ready and says nothing for so long is taken for dead."""
_SECONDS_BETWEEN_TURNS = 0.5
_SECONDS_BETWEEN_FORECASTS = 5.0
_SAVE_INTERVAL = 25
"""Steps of a job between saves, unless the operator's flags say otherwise."""

Send = tuple[str, Message]


@dataclass
class ControlLoop:
    """See the module.

    Attributes:
        settings: Of the service.
        hub: Sends commands.
        records: Takes over what lost instances left.
        changed: Set when there is something to look at; the loop looks twice a second anyway.
        say: Told of instances that come and go.
    """

    settings: Settings
    store: Store
    hub: Hub
    records: JobRecords
    executor: Executor
    changed: asyncio.Event
    say: Callable[[str], None]
    observed: Observed = field(init=False)
    _policy: Policy = field(init=False)
    _sends: list[Send] = field(default_factory=list)
    _predicts_at: float = 0.0

    def __post_init__(self) -> None:
        self.observed = Observed(self.settings)
        self.records.no_room = self.observed.refused
        self._policy = Fair() if self.settings.policy == "fair" else Fifo()

    async def run(self) -> None:
        """Run until it is cancelled."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), _SECONDS_BETWEEN_TURNS)
            self.changed.clear()
            peers = dict(self.hub.peers)
            await asyncio.to_thread(self._turn, peers)
            sends, self._sends = self._sends, []
            for instance, message in sends:
                self.hub.send(instance, message)

    def _turn(self, peers: Mapping[str, Peer]) -> None:
        """Look after instances and jobs once; in a thread, as it waits for the database and for processes."""
        for instance in self._live():
            self._check(instance, peers.get(instance.name))
        self._write_results()
        instances = self._live()
        with self.store.read() as session:
            cluster = self.observed.cluster(session, instances, peers)
        predicts = time.monotonic() >= self._predicts_at
        if predicts:
            self._predicts_at = time.monotonic() + _SECONDS_BETWEEN_FORECASTS
        planned = plan(cluster, self._policy, time.time(), predicts)
        self._carry_out(planned.decisions, planned.forecasts)
        self._reconcile(peers)

    def _live(self) -> Sequence[Instance]:
        with self.store.read() as session:
            return session.scalars(select(Instance).where(Instance.state != "gone")).all()

    # -- instances

    def _check(self, instance: Instance, peer: Peer | None) -> None:
        """Find out whether an instance has become ready, or died."""
        silent = self.observed.heard(instance.name, peer)
        if self.executor.exited(instance.handle):
            self._lose(instance, "has ended")
        elif instance.state == "starting":
            if peer is not None:
                self._set_state(instance.name, "ready")
                self.observed.became_ready(instance)
                self.say(f"instance {instance.name} is ready: {instance.backbone}")
        elif silent > SILENCE_SECONDS:
            self._lose(instance, f"was silent for {silent:.0f} s")

    def _set_state(self, name: str, state: str) -> None:
        with self.store.write() as session:
            session.get_one(Instance, name).state = state

    def _lose(self, instance: Instance, what: str) -> None:
        """Take over what an instance has left, and have its jobs wait for another one."""
        self.executor.stop(instance.handle, kill=True)  # before its files are read: it writes no more
        is_death = instance.state != "draining"
        with self.store.write() as session:
            own = session.get_one(Instance, instance.name)
            own.state, own.ended_at, own.reason = "gone", time.time(), what
            jobs = session.scalars(select(Job).where(Job.instance == instance.name)).all()
            for job in jobs:
                self.records.collect(session, job, self.settings.runs / instance.name)
            left = [job for job in jobs if job.instance == instance.name]
            blamed = blame([self.observed.job(job) for job in left]) if is_death else {}
            for job in left:
                job.suspects, job.lone_deaths = blamed.get(job.id, (job.suspects, job.lone_deaths))
                end_lease(session, job, _after_death(job) if is_death else "")
        if is_death:
            self.observed.died(instance)
        self.observed.forget(instance.name)
        self.say(f"instance {instance.name} {what}" + (f": {len(left)} jobs wait again" if left else ""))

    def _launch(self, decision: Launch) -> None:
        """Start an instance. A server that is killed right then refuses it later: the database does not know it."""
        with self.store.read() as session:
            count = session.scalar(select(func.count()).where(Instance.slot == decision.slot)) or 0
        name, token = f"{decision.slot}.{count}", secrets.token_urlsafe(32)
        launch = LaunchedInstance(
            name,
            self._words(name, decision.backbone),
            self.settings.processes,
            {TOKEN_VARIABLE: token, **self._threads()},
            self.settings.runs / f"{name}.log",
        )
        try:
            handle = self.executor.start(launch)
        except OSError as error:
            _log.error("instance %s cannot be started: %s", name, error)
            return
        with self.store.write() as session:
            session.add(
                Instance(
                    name=name,
                    slot=decision.slot,
                    backbone=decision.backbone,
                    state="starting",
                    token_hash=hash_of(token),
                    handle=dict(handle),
                    started_at=time.time(),
                )
            )
        self.say(f"instance {name} is started: {decision.reason}")

    def _words(self, name: str, backbone: str) -> list[str]:
        """The flags of an instance."""
        settings, directory = self.settings, self.settings.runs / name
        words = ["--instance", name, "--server", str(settings.socket), "--root", str(settings.state)]
        words += [
            "--backbone",
            str(settings.backbones[backbone]),
            "--save",
            str(directory),
            "--mux-no-progress",
        ]
        if not any(flag.partition("=")[0] == "--save-interval" for flag in settings.flags):
            words += ["--save-interval", str(_SAVE_INTERVAL)]
        return [*words, *settings.flags]

    def _threads(self) -> dict[str, str]:
        """Instances of one machine share its cores."""
        if "OMP_NUM_THREADS" in os.environ:
            return {}
        ranks = self.settings.instances * self.settings.processes
        return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}

    # -- decisions

    def _carry_out(self, decisions: Iterable[Decision], forecasts: Mapping[str, Forecast]) -> None:
        waits: list[Wait] = []
        for decision in decisions:
            match decision:
                case Launch():
                    self._launch(decision)
                case Retire(instance=name):
                    self._set_state(name, "draining")
                    self._sends.append((name, Drain()))
                    self.say(f"instance {name} is given up: {decision.reason}")
                case Start() | Leave() | Fail():
                    with self.store.write() as session:
                        self._decide(session, decision)
                case Wait():
                    waits.append(decision)
        self._note_forecasts(waits, forecasts)

    def _decide(self, session: Session, decision: Start | Leave | Fail) -> None:
        job = session.scalars(select(Job).where(Job.id == decision.job)).one()
        match decision:
            case Start(instance=name):
                if job.instance is None and job.desired == "run" and job.status == "queued":
                    job.attempt, job.instance, job.reason = job.attempt + 1, name, decision.reason
                    self.observed.started(job)
            case Leave(instance=name):
                if job.instance == name and (job.id, job.attempt) not in self.observed.leaving:
                    self.observed.leaving.add((job.id, job.attempt))
                    self._sends.append((name, LeaveCommand(job=job.id, attempt=job.attempt)))
                    add_event(session, job, f"the job is saved and leaves: {decision.reason}")
            case Fail():
                fail(session, job, "instance_died", decision.reason)

    def _note_forecasts(self, waits: Sequence[Wait], forecasts: Mapping[str, Forecast]) -> None:
        """Keep why jobs wait and what is predicted, where that has changed."""
        reasons = {wait.job: wait.reason for wait in waits}
        with self.store.write() as session:
            for job in session.scalars(select(Job).where(Job.id.in_([*reasons, *forecasts]))):
                if job.id in reasons and job.reason != reasons[job.id]:
                    job.reason = reasons[job.id]
                    add_event(session, job, f"the job waits: {job.reason}")
                if job.id in forecasts:
                    job.estimated_start = _rounded(forecasts[job.id].start, job.estimated_start)
                    job.estimated_finish = _rounded(forecasts[job.id].end, job.estimated_finish)

    # -- jobs

    def _reconcile(self, peers: Mapping[str, Peer]) -> None:
        """Give connected instances the jobs that are theirs, and take from them those that are not."""
        with self.store.read() as session:
            jobs = session.scalars(
                select(Job).where(Job.instance.in_(list(peers)), Job.finished_at.is_(None))
            ).all()
        leased = {(job.instance, job.id): job for job in jobs}
        self.observed.leaving &= {(job.id, job.attempt) for job in jobs}
        for name, peer in peers.items():
            for own, attempt in list(peer.held.items()):
                job = leased.get((name, own))
                if job is None or job.attempt != attempt:
                    del peer.held[own]
                    self._sends.append((name, LeaveCommand(job=own, attempt=attempt)))
        for job in jobs:
            peer = peers[str(job.instance)]
            if job.id not in peer.held:
                peer.held[job.id] = job.attempt
                self._sends.append((peer.name, self._submission(job)))

    def _submission(self, job: Job) -> Submit:
        saved = str((self.settings.state / job.checkpoint).parent) if job.checkpoint else ""
        return Submit(job=job.id, attempt=job.attempt, task=job.task, continue_from=saved)

    def _write_results(self) -> None:
        """Write the results of jobs that have finished."""
        with self.store.read() as session:
            finished = session.scalars(
                select(Job.id).where(Job.status == "running", Job.finished_at.is_not(None))
            ).all()
        for job in finished:
            write_results(self.settings, self.store, job)


def _after_death(job: Job) -> str:
    step = f"it goes on from step {job.saved_step}" if job.saved_step else "it begins again"
    return f"the process that trained it has died; {step}"


def _rounded(new: float | None, before: float | None) -> float | None:
    """A predicted time, changed only by what is worth telling."""
    if new is None or before is None or abs(new - before) > 1.0:
        return new
    return before
