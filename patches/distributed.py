"""torch.distributed: collectives that write into a tensor without telling autograd.

They change a tensor and leave its version counter alone, so a tensor that was measured before must be
measured again after. Nothing is recorded here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msprobe_megatron.patching import Patch

# Not the receives: torch compares `P2POp.op` with `isend` and `irecv` by identity, and they write into buffers that
# nobody has measured before.
_IN_PLACE = ("all_reduce", "broadcast", "reduce", "all_reduce_coalesced")


def _forget(original: Callable[..., Any], events: Any) -> Callable[..., Any]:
    def collective(*args: Any, **kwargs: Any) -> Any:
        events.memory_changed()
        return original(*args, **kwargs)

    return collective


PATCHES = [
    Patch(
        f"distributed.{name}",
        (f"torch.distributed:{name}",),
        _forget,
        phase="recording",
        why="writes in place unseen by autograd: measured tensors must be measured again",
    )
    for name in _IN_PLACE
]
