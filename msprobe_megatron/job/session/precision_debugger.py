"""`PrecisionDebugger`: msprobe's own API (start, stop, step, save), for scripts that are written for it.

A thin driver of a `Session`: calls between `start` and `stop` are recorded, `step` ends the step. Needs no Megatron;
under Megatron, microbatches and stages still come from the schedule. Also the oldest form of the API, with `hook_name`
and `configure_hook`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from msprobe_megatron.config import ConfigError, ProbeConfig, from_document
from msprobe_megatron.config.document import read_document
from msprobe_megatron.config.msprobe.debugger_arguments import configured, oldest_form, with_arguments
from msprobe_megatron.job.session.save import save
from msprobe_megatron.job.session.seed_all import seed_all
from msprobe_megatron.job.session.session import Session
from msprobe_megatron.job.session.steps import State
from msprobe_megatron.topology import coordinates

_NO_STEP = -1


class _HandDriven(Session):
    """A session whose steps begin and end by `start` and `step`, not with the first call of the model."""

    running = False

    def resume(self, *, begin: bool) -> None:
        """Record from here on; `begin` starts a step if none is being recorded."""
        self.running = True
        if self.state is State.RECORDING:
            self._notify(self.features.resume)
        elif begin:
            if self.state is State.IN_STEP:  # it began before `start`, and was not recorded
                self._move(State.IDLE)
            self.schedule_begin("PrecisionDebugger", None)
            self.in_schedule = False

    def pause(self) -> None:
        """Stop recording this step until `resume`."""
        self.running = False
        self._notify(self.features.pause)

    def forward_begin(self, model: nn.Module) -> None:
        """Each call of the model is a microbatch."""
        if self.running and not self.in_schedule:
            self.microbatch_begin(model, None, [])

    @contextmanager
    def outside_step(self) -> Iterator[None]:
        """Calls without gradients count like others: inference can be recorded too."""
        self.forward_begin(self._chunks[0])
        yield


class PrecisionDebugger:
    """A singleton: a second one is the first. Every method may be called on the class as well."""

    _only: ClassVar[PrecisionDebugger | None] = None

    def __new__(cls, *args: Any, **kwargs: Any) -> PrecisionDebugger:
        """The debugger of this process; the arguments of the first call count."""
        if cls._only is None:
            made = super().__new__(cls)
            made._set_up(*args, **kwargs)
            cls._only = made
        return cls._only

    def _set_up(
        self,
        config_path: str | os.PathLike[str] | None = None,
        task: str | None = None,
        dump_path: str | None = None,
        level: str | None = None,
        step: Any = None,
        *,
        hook_name: str | None = None,
        rank: Any = None,
    ) -> None:
        given = {"task": task, "dump_path": dump_path, "level": level, "step": step, "rank": rank}
        if hook_name is not None:
            self._document: dict[str, Any] = oldest_form(hook_name, dump_path, rank, step)
        else:
            document = {"task": "statistics"} if config_path is None else read_document(config_path)
            if not isinstance(document, dict):
                raise ConfigError(f"{config_path}: is not a mapping at the top; accepted: a config.json of msprobe")
            self._document = with_arguments(document, given) if "dump" not in document else document
        self._source = "PrecisionDebugger" if config_path is None else os.fspath(config_path)
        self._oldest = hook_name is not None
        self._config: ProbeConfig = from_document(self._document, self._source)
        self._session: _HandDriven | None = None
        self._first = self._steps = 0
        self._running = self._collected = False
        self._by_hand = True
        self._hook: Any = None

    @classmethod
    def configure_hook(cls, mode: str = "api_stack", **options: Any) -> None:
        """Second call of the oldest form of the API: which calls, and with `summary_only` only their statistics."""
        self = cls._made()
        if not self._oldest:
            raise ConfigError(
                "configure_hook: belongs to PrecisionDebugger(hook_name=…); accepted: keys of config_path"
            )
        if self._session is not None:
            raise ConfigError("configure_hook: recording has begun; accepted: before the first start")
        try:
            self._document = configured(self._document, mode, **options)
        except TypeError as error:
            raise ConfigError(f"configure_hook: {error}") from None
        self._config = from_document(self._document, self._source)

    @classmethod
    def start(cls, model: nn.Module | Sequence[nn.Module] | None = None, **ignored: Any) -> None:
        """Record from here on. `model` (one, or the chunks of a pipeline) is needed for modules: L0 and mix."""
        if ignored:
            raise ConfigError(f"PrecisionDebugger.start: {next(iter(ignored))} belongs to inference; accepted: model")
        self = cls._made()
        if self._session is None:
            self._attach(model)
        if self._session is not None and not self._running:
            self._running = True
            self._session.resume(begin=self._by_hand)

    @classmethod
    def stop(cls) -> None:
        """Stop recording; another `start` in the same step continues it."""
        self = cls._made()
        if self._session is not None and self._running:
            self._running = False
            self._session.pause()

    @classmethod
    def step(cls) -> None:
        """End the step: write it and increment the step number."""
        self = cls._made()
        self._running = False
        if self._session is not None:
            self._session.running = False
            if self._collected:
                self._session.optimizer_end()
            else:
                self._session.step()
        self._collected = False
        self._steps += 1

    @classmethod
    def save(cls, variable: Any, name: str, save_backward: bool = True) -> None:
        """Record a variable; at level debug no `start` is needed."""
        self = cls._made()
        dump = self._config.dump
        if dump is not None and dump.level == "debug" and not self._running:
            cls.start()
        save(variable, name, save_backward)

    @classmethod
    def set_init_step(cls, step: int) -> None:
        """Set the number of the next step, for training that was resumed."""
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ConfigError(f"set_init_step: {step!r} is not a step; accepted: a whole number from 0 up")
        self = cls._made()
        self._first, self._steps = step, 0

    seed_all = staticmethod(seed_all)

    @classmethod
    def close(cls) -> None:
        """Write what is left and drop the singleton. Also done when the process ends."""
        self, cls._only = cls._only, None
        if self is not None and self._session is not None:
            self._session.close()
        if self is not None and self._hook is not None:
            self._hook.remove()

    @classmethod
    def _made(cls) -> PrecisionDebugger:
        if cls._only is None:
            raise ConfigError("PrecisionDebugger: not created yet; call PrecisionDebugger(config_path=…) first")
        return cls._only

    def _attach(self, model: nn.Module | Sequence[nn.Module] | None) -> None:
        chunks = [] if model is None else [model] if isinstance(model, nn.Module) else list(model)
        dump = self._config.dump
        if dump is not None and dump.level in ("L0", "mix") and not chunks:
            raise ConfigError(
                f"{self._source}: level {dump.level} needs start(model); accepted: a module or a list of them"
            )
        # Megatron's schedules begin a step themselves, and count its microbatches.
        self._by_hand = not chunks or coordinates.parallel_state() is None
        self._session = _HandDriven(chunks, None, self._config, step=self._coming)
        self._hook = register_optimizer_step_pre_hook(self._before_optimizer)

    def _coming(self) -> int:
        return self._first + self._steps if self._running else _NO_STEP

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Collect weights and gradients as the first optimizer of the step is about to use them."""
        if self._session is not None and self._running and self._by_hand and not self._collected:
            self._collected = True
            self._session.optimizer_begin()
