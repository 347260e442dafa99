"""megatron.core.pipeline_parallel.schedules: where a step begins and which microbatch runs.

`get_forward_backward_func` returns these module globals at call time, so every user of megatron-core is covered,
however it imported the getter. `forward_step` gives microbatch and virtual stage; its parameters were reordered
between releases, so they are looked up by name in the installed signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from msprobe_megatron.job.patching.attributes import PatchError
from msprobe_megatron.job.patching.patch_set import Patch, host_version

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"


def _schedule(original: Callable[..., Any], events: Any) -> Callable[..., Any]:
    def forward_backward(*args: Any, **kwargs: Any) -> Any:
        # Every schedule takes keyword arguments only, in every release.
        session = events.session_of(kwargs.get("model"))
        # Already inside: other code wrapped this function without `functools.wraps`, and it was patched again on top.
        if session is None or session.in_schedule:
            return original(*args, **kwargs)
        if bool(kwargs.get("forward_only")) != session.forward_only:
            with session.other_schedule():
                return original(*args, **kwargs)
        session.schedule_begin(original.__name__, kwargs.get("num_microbatches"))
        try:
            return original(*args, **kwargs)
        except BaseException:
            session.schedule_failed()
            raise
        finally:
            session.schedule_end()

    return forward_backward


def _forward_step(original: Callable[..., Any], events: Any) -> Callable[..., Any]:
    names = list(inspect.signature(original).parameters)
    for name in ("model", "forward_data_store"):
        if name not in names:
            raise PatchError(
                f"schedules.forward_step of megatron-core {host_version()} has no parameter {name!r}: this release"
                " is not supported"
            )
    model_at, store_at = names.index("model"), names.index("forward_data_store")
    microbatch_at = names.index("current_microbatch") if "current_microbatch" in names else -1

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        def argument(name: str, index: int) -> Any:
            return args[index] if 0 <= index < len(args) else kwargs.get(name)

        model = argument("model", model_at)
        session = events.session_of(model)
        if session is None:
            return original(*args, **kwargs)
        store = argument("forward_data_store", store_at)
        session.microbatch_begin(model, argument("current_microbatch", microbatch_at), store)
        try:
            return original(*args, **kwargs)
        finally:
            session.microbatch_end(store)

    return forward_step


PATCHES = [
    *(
        Patch(
            f"schedules.{name}",
            (f"{_SCHEDULES}:{name}",),
            _schedule,
            phase="functions",
            why="a step begins with a schedule: one that trains, or with `forward_only` one that does not",
            required=True,
        )
        for name in (
            "forward_backward_no_pipelining",
            "forward_backward_pipelining_without_interleaving",
            "forward_backward_pipelining_with_interleaving",
        )
    ),
    Patch(
        "schedules.forward_step",
        (f"{_SCHEDULES}:forward_step",),
        _forward_step,
        phase="recording",
        why="microbatch and virtual stage of each forward",
        required=True,
    ),
]
