"""The table of a run's tasks: drawn at any width, live on a terminal and once at the end."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from megatron_mux.engine import EvalResult
from megatron_mux.sweep.texts import short_heading, value_texts
from megatron_mux.tasks import TaskSpec
from megatron_mux.tasks.life import State, TaskLife
from megatron_mux.tasks.sweep import Settings

_SHOWN: Mapping[State, str] = {"joining": "joining (tokenising)", "parked": "running"}
"""Words for states, unless they are the state's name."""

_GAP = 2
"""Blanks between columns."""
_OTHER_LINES = 4
"""Lines of a terminal beside the rows: summary, headings, what is left out, cursor."""
_MOMENTS = 120
"""At least as many seconds are looked back for tokens per second."""
_WORDS = ("task", "adapter", "status")
_HEADINGS = {"r": "r", "learning_rate": "lr", "loss": "objective"}
"""Headings of settings, unless it is the field's name; these come before others where tasks differ in them."""
_NO_SETTINGS = (
    "peft_type", "adapter_name_or_path", "max_steps", "num_train_epochs", "run_name", "project", "logging_dir",
)  # fmt: skip
"""Fields that say nothing of how a task is trained, or that the table has anyway."""
_DROPPED = ("adapter", "tokens/s", "accuracy", "eval loss", "lr", "r", "loss", "step")
"""Columns that give way where there is little room, one after the other."""


@dataclass
class TaskHistory:
    """One task's figures in this run.

    Attributes:
        kind: Of its adapter.
        life: Its state.
        total_steps: None while its data are not known.
        settings: Fields of its adapter and its training that hold one value.
        steps, tokens, seconds: Of its steps in this run; seconds of the engine's steps, as `Reporter.step` gets them.
    """

    kind: str
    life: TaskLife
    total_steps: int | None = None
    step: int = 0
    first_loss: float | None = None
    loss: float | None = None
    learning_rate: float = 0.0
    before: EvalResult | None = None
    after: EvalResult | None = None
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """Its state as the table shows it."""
        return _SHOWN.get(self.life.state, self.life.state)

    @property
    def reason(self) -> str:
        """Why it failed; else empty."""
        return self.life.reason


@dataclass(frozen=True)
class _Column:
    """A heading, and a cell for each task; `short` are its cells where there is little room."""

    heading: str
    cells: list[str]
    short: list[str] | None = None

    @property
    def width(self) -> int:
        return max(map(len, (self.heading, *self.cells)))

    def padded(self) -> list[str]:
        """The heading and the cells, all as wide as the column."""
        pad = str.ljust if self.heading in _WORDS else str.rjust
        return [pad(text, self.width) for text in (self.heading, *self.cells)]


class TaskTable:
    """Draws the tasks of a run, a row each, in the order in which they were added.

    A column without values is left out. Where there is little room, settings other than the rank and the learning rate
    give way first, then values from before (`3.1 -> 2.4` becomes `2.4`), then the columns of `_DROPPED`. Names are cut
    only once nothing but the status is left beside them.

    Drawing takes place when rich refreshes the display, however much was reported in between, and until `is_final`
    there are no more rows than the terminal has lines.

    Args:
        clock: Returns seconds.

    Attributes:
        tasks: By name.
        is_final: Whether it is drawn for the last time.
        swept: What the configurations of sweeps are given, by task and field; whoever knows it fills it in.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.tasks: dict[str, TaskHistory] = {}
        self.swept: dict[str, Settings] = {}
        self.is_final = False
        self._clock = clock
        self._began = clock()
        self._tokens = 0
        self._moments: deque[tuple[float, int]] = deque(maxlen=_MOMENTS)
        self._latest = (self._began, 0)
        self._differing: list[str] | None = None
        self._training: set[str] = set()

    def add(self, spec: TaskSpec, life: TaskLife, step: int = 0, total_steps: int | None = None) -> None:
        """Add a task's row, or bring it up to date."""
        if life.trains:
            if not any(self.tasks[name].life.trains for name in self._training - {spec.name}):
                self._latest = (self._clock(), self._tokens)  # nobody was trained until now
                self._moments.clear()
                self._moments.append(self._latest)
            self._training.add(spec.name)
        if spec.name not in self.tasks:
            self.tasks[spec.name] = TaskHistory(spec.adapter.peft_type, life, settings=_settings(spec))
            self._differing = None
        task = self.tasks[spec.name]
        task.life, task.step = life, step
        task.total_steps = task.total_steps if total_steps is None else total_steps

    def count(self, name: str, tokens: int, seconds: float) -> None:
        """Count a step of a task; see `TaskHistory`."""
        task = self.tasks[name]
        task.steps += 1
        task.tokens += tokens
        task.seconds += seconds
        self._tokens += tokens
        self._latest = (self._clock(), self._tokens)
        if not self._moments or self._latest[0] - self._moments[-1][0] >= 1:
            self._moments.append(self._latest)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Draw; nothing before there is a task."""
        names = list(self.tasks)
        if not names:
            return
        if console.is_terminal and not self.is_final:
            names = self._shown(names, max(1, console.height - _OTHER_LINES))
        yield Text(self._summary())
        columns = _fitted(list(self._columns(names)), options.max_width)
        for row, line in enumerate(zip(*(column.padded() for column in columns), strict=True)):
            yield Text((" " * _GAP).join(line).rstrip(), style="" if row else "bold", no_wrap=True)
        if len(names) < len(self.tasks):
            left_out = [task.status for name, task in list(self.tasks.items()) if name not in set(names)]
            yield Text(f"and {len(left_out)} more: {_counted(left_out)}")

    def _shown(self, names: list[str], room: int) -> list[str]:
        """The first tasks that there is room for, those that are under way before those that are done or stopped."""
        if len(names) <= room:
            return names
        lives = {name: self.tasks[name].life for name in names}
        chosen = set(sorted(names, key=lambda own: lives[own].is_over or lives[own].state == "pruned")[:room])
        return [name for name in names if name in chosen]

    def _summary(self) -> str:
        """Time passed, time left, tokens per second of all tasks, and how many tasks have which status."""
        tasks = list(self.tasks.values())
        parts = [f"elapsed {_time(self._clock() - self._began)}"]
        since, tokens = self._moments[0] if self._moments else self._latest
        if self._latest[0] > since:
            speed = (self._latest[1] - tokens) / (self._latest[0] - since)
            if (left := self._tokens_left(tasks)) and speed:
                parts.append(f"remaining {_time(left / speed)}")
            parts.append(f"{speed:,.0f} tokens/s")
        return f"{', '.join(parts)}; {_counted(task.status for task in tasks)}"

    def _tokens_left(self, tasks: Sequence[TaskHistory]) -> float:
        """Tokens of the steps to come: a task's steps are as long as they were, or as those of others."""
        mean = self._tokens / max(1, sum(task.steps for task in tasks))
        left = 0.0
        for task in tasks:
            if (task.life.trains or task.life.state == "waiting") and task.total_steps is not None:
                of_step = task.tokens / task.steps if task.steps else mean
                left += (task.total_steps - task.step) * of_step
        return left

    def _columns(self, names: Sequence[str]) -> Iterator[_Column]:
        """All columns, as wide as they can be."""
        tasks = [self.tasks[name] for name in names]
        yield _Column("task", list(names))
        yield _Column("adapter", [task.kind for task in tasks])
        if self._differing is None:
            self._differing = _differing([task.settings for task in list(self.tasks.values())])
        swept = dict(self._swept_columns(names))
        for key in [key for key in self._differing if key not in swept]:
            yield _Column(_HEADINGS.get(key, key), [task.settings.get(key, "-") for task in tasks])
        yield from swept.values()
        steps = [f"{task.step}/{task.total_steps}" if task.total_steps is not None else "-" for task in tasks]
        yield _Column("step", steps)
        yield _changes("loss", [(task.first_loss, task.loss) for task in tasks], "{:.3f}")
        both = [(task.before, task.after) for task in tasks]
        yield _changes("eval loss", [(_loss(first), _loss(last)) for first, last in both], "{:.3f}")
        yield _changes("accuracy", [(_accuracy(first), _accuracy(last)) for first, last in both], "{:.1%}")
        yield _Column("tokens/s", [f"{t.tokens / t.seconds:.0f}" if t.seconds else "-" for t in tasks])
        yield _Column("status", [task.status for task in tasks])

    def _swept_columns(self, names: Sequence[str]) -> Iterator[tuple[str, _Column]]:
        """Yield what sweeps give and `TaskHistory.settings` lack, by field: lists, and fields of `data` and `eval`."""
        swept = dict(self.swept)
        for key in dict.fromkeys(key for own in swept.values() for key in own):
            given = {name: own[key] for name, own in swept.items() if key in own}
            section, _, last = key.partition(".")
            if section in ("adapter", "training"):
                plain = [task.settings for own in given if (task := self.tasks.get(own)) is not None]
                if last in _NO_SETTINGS or all(last in own for own in plain):
                    continue
            texts = dict(zip(given, value_texts(key, [*given.values()]), strict=True))
            if len(set(texts.values())) > 1:
                column = _Column(short_heading(key), [texts.get(name, "-") for name in names])
                yield (last if section in ("adapter", "training") else key), column


def _fitted(columns: list[_Column], width: int) -> list[_Column]:
    """Let columns give way until the others fit into `width`."""
    columns = [column for column in columns if set(column.cells) != {"-"}]

    def too_wide() -> bool:
        return sum(column.width + _GAP for column in columns) - _GAP > width

    known = ("task", "status", *_DROPPED)
    for setting in [column for column in columns if column.heading not in known][::-1]:
        if too_wide():
            columns.remove(setting)
    for heading in ("accuracy", "eval loss", "loss"):
        if too_wide():
            columns = [
                _Column(heading, column.short) if column.heading == heading and column.short else column
                for column in columns
            ]
    for heading in _DROPPED:
        if too_wide():
            columns = [column for column in columns if column.heading != heading]
    if too_wide():
        room = max(2, width - columns[-1].width - _GAP)
        names = [name if len(name) <= room else f"{name[: room - 1]}…" for name in columns[0].cells]
        columns[0] = _Column("task", names)
    return columns


def _settings(spec: TaskSpec) -> dict[str, str]:
    """See `TaskHistory`."""
    plain = spec.plain()
    return {
        key: "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        for key, value in {**plain["training"], **plain["adapter"]}.items()
        if isinstance(value, str | int | float | None) and key not in _NO_SETTINGS
    }


def _differing(settings: Sequence[dict[str, str]]) -> list[str]:
    """The settings that are not the same for all tasks that have them, the most telling first."""
    keys = dict.fromkeys([*_HEADINGS, *(key for own in settings for key in own)])
    return [key for key in keys if len({own[key] for own in settings if key in own}) > 1]


def _changes(heading: str, pairs: Iterable[tuple[float | None, float | None]], form: str) -> _Column:
    """A column of first and last values."""
    cells: list[str] = []
    short: list[str] = []
    for first, last in pairs:
        short.append("-" if last is None else form.format(last))
        changed = first is not None and last is not None and first != last
        cells.append(f"{form.format(first)} -> {short[-1]}" if changed else short[-1])
    return _Column(heading, cells, short)


def _loss(result: EvalResult | None) -> float | None:
    return None if result is None else float(result.loss)


def _accuracy(result: EvalResult | None) -> float | None:
    return None if result is None else result.accuracy


def _counted(statuses: Iterable[str]) -> str:
    counts = Counter(status.partition(" ")[0] for status in statuses)
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
