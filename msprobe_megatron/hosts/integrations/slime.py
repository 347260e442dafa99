"""slime: its own hook after Megatron's initialisation, with no change of code.

    --custom-megatron-init-path msprobe_megatron.integrations.slime.init    and  MSPROBE_CONFIG=probe.yaml

slime builds its model in its own function; the kit attaches when Megatron's optimizer is made for it.
"""

from __future__ import annotations

from typing import Any


def init(args: Any = None) -> None:
    """Make this process ready; the model that is built next is attached."""
    from msprobe_megatron.config.flags import Flags, from_namespace
    from msprobe_megatron.job.session.arming import arm

    flags = from_namespace(args) if args is not None else Flags()
    # Megatron is imported by now: the emulation on CPU is the caller's to install, and before that.
    arm(flags if flags.armed else None, install=False)
