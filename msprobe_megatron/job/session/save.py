"""`save`: the training code hands a variable to the probe by name. A no-op unless a step is being recorded."""

from __future__ import annotations

from typing import Any

from msprobe_megatron.job.session.faults import ProbeFault
from msprobe_megatron.job.session.patch_scopes import ROUTER


def save(variable: Any, name: str, save_backward: bool = True) -> None:
    """Record a tensor, or tensors and numbers nested in lists, tuples, dicts and dataclasses, and their gradients.

    Rows are named ``debug/NAME.n`` for the n-th call with this name in a microbatch. Works at every level of the dump;
    at ``level: debug`` there are no other rows. Never raises into the training code.
    """
    for session in ROUTER.sessions():
        if not session.features.active:
            continue
        try:
            if not isinstance(name, str) or not name.strip():
                raise TypeError(f"name: {name!r} is not a name; accepted: text that is not empty")
            session.features.saved(variable, name, bool(save_backward))
        except ProbeFault:
            raise
        except TypeError as error:
            session.messages.report(f"save: {error}; not recorded", "save")
        except Exception as error:
            session.fault(error, f"save of {name}")
