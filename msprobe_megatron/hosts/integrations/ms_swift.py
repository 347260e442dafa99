"""ms-swift (`megatron sft`, `megatron pt`, …): a callback that its trainer finds by name.

    megatron sft ... --external_plugins msprobe_plugin.py --callbacks msprobe

where msprobe_plugin.py holds the one line ``from msprobe_megatron.integrations import ms_swift; ms_swift.register()``.
The probe file comes from $MSPROBE_CONFIG.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msprobe_megatron.job.session.session import Session

NAME = "msprobe"
_MODULES = ("swift.megatron.callbacks", "swift.megatron.trainers.callbacks")


class ProbeCallback:
    """Attaches at the beginning of training; the steps are those of the trainer's own state."""

    session: Session | None = None

    def __init__(self, trainer: Any, config: Any = None) -> None:
        self.trainer, self._config = trainer, config

    def on_train_begin(self) -> None:
        """The trainer's models and optimizer exist."""
        from msprobe_megatron import attach

        trainer = self.trainer

        def step() -> int:
            return int(trainer.state.iteration)

        self.session = attach(trainer.wrapped_models, trainer.optimizer, self._config, step=step)

    def on_train_end(self) -> None:
        """Training is over."""
        if self.session is not None:
            self.session.close()

    def __getattr__(self, name: str) -> Any:
        """Every other event of the trainer, of whatever release, is none of the kit's business."""
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(name)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def register(callbacks: dict[str, Any] | None = None) -> None:
    """Enter the callback into ms-swift's table (or the one that is given) under the name `msprobe`."""
    if callbacks is None:
        callbacks = _table()
    callbacks[NAME] = ProbeCallback


def _table() -> dict[str, Any]:
    for name in _MODULES:
        try:
            found: dict[str, Any] = importlib.import_module(name).megatron_callbacks_map
        except (ImportError, AttributeError):
            continue
        return found
    raise RuntimeError(
        f"msprobe: ms-swift's table megatron_callbacks_map was not found in {' or '.join(_MODULES)};"
        " accepted: register(table) with the table of your release"
    )
