"""Megatron-Bridge (0.3 and newer): a callback for `pretrain(cfg, forward_step, callbacks=[...])`.

from msprobe_megatron.integrations.megatron_bridge import ProbeCallback
pretrain(cfg, forward_step, callbacks=[ProbeCallback("probe.yaml")])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msprobe_megatron.job.session.session import Session


class ProbeCallback:
    """Attaches when training starts, with Bridge's own step numbers, and closes when it ends.

    Bridge asks a callback for its methods and for no base class.
    """

    session: Session | None = None

    def __init__(self, config: Any = None, *, tag: str | None = None) -> None:
        self._config, self._tag = config, tag

    def on_train_start(self, context: Any) -> None:
        """The model and the optimizer exist, a checkpoint is loaded."""
        from msprobe_megatron import attach

        state = context.state

        def step() -> int:
            return int(state.train_state.step)

        self.session = attach(context.model, context.optimizer, self._config, tag=self._tag, step=step)

    def on_train_end(self, context: Any) -> None:
        """Training is over."""
        if self.session is not None:
            self.session.close()
