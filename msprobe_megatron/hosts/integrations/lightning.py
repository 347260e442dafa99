"""Lightning (and NeMo, whose trainer is Lightning's): a callback.

from msprobe_megatron.integrations.lightning import ProbeCallback
Trainer(callbacks=[ProbeCallback("probe.yaml")])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msprobe_megatron.job.session.session import Session


def _base() -> type:
    """Lightning's own class, which its trainer insists on; without Lightning, nothing."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            found: type = importlib.import_module(name).Callback
        except (ImportError, AttributeError):
            continue
        return found
    return object


class _ProbeCallback:
    """Attaches to the model when training starts; steps are the trainer's global steps.

    Lightning runs forward and backward inside `optimizer.step`, and calls `training_step` rather than the module:
    microbatches and steps are taken from its own events. NeMo runs Megatron's schedule, which needs none of that.
    """

    session: Session | None = None

    def __init__(self, config: Any = None, *, tag: str | None = None) -> None:
        super().__init__()
        self._config, self._tag = config, tag
        self._by_events = self._stepped = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The strategy has wrapped the model and made the optimizers."""
        from msprobe_megatron import attach

        chunks = getattr(trainer.strategy, "megatron_parallel", None)
        self._by_events = chunks is None
        optimizer = None
        if chunks is not None and trainer.optimizers:
            # NeMo wraps Megatron's optimizer, whose step is the one that is called.
            optimizer = getattr(trainer.optimizers[0], "mcore_optimizer", trainer.optimizers[0])

        def step() -> int:
            return int(trainer.global_step)

        model = list(chunks) if chunks is not None else pl_module
        self.session = attach(model, optimizer, self._config, tag=self._tag, step=step)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A microbatch begins; calls of the module within it are part of it."""
        if self.session is not None and self._by_events:
            self._stepped = False
            self.session.forward_begin(pl_module)
            self.session.in_schedule = True

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Gradients are complete, and unscaled."""
        if self.session is not None and self._by_events:
            self._stepped = True
            self.session.optimizer_begin()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The microbatch is over, and the step if the optimizer has stepped."""
        if self.session is not None and self._by_events:
            self.session.in_schedule = False
            if self._stepped:
                self.session.optimizer_end()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Training is over."""
        if self.session is not None:
            self.session.close()


def __getattr__(name: str) -> Any:
    if name == "ProbeCallback":
        found = type("ProbeCallback", (_ProbeCallback, _base()), {"__doc__": _ProbeCallback.__doc__})
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
