"""`save`: the training code hands a variable to the probe by name. Does nothing where no step is being recorded."""

from __future__ import annotations

from typing import Any

from msprobe_megatron.dispatch import DISPATCHER
from msprobe_megatron.fault_guard import ProbeFault


def save(variable: Any, name: str, save_backward: bool = True) -> None:
    """Record a tensor, or tensors and numbers nested in lists, tuples, dicts and dataclasses, and their gradients.

    Rows are called ``debug/NAME.n`` for the n-th call with this name in a microbatch. Works at every level of the dump;
    at ``level: debug`` there are no other rows. Never raises into the training code.

    Example::

        from msprobe_megatron import save
        save({"logits": logits, "temperature": 0.7}, "head")
    """
    for session in DISPATCHER.sessions():
        if not session.parts.active:
            continue
        try:
            if not isinstance(name, str) or not name.strip():
                raise TypeError(f"name: {name!r} is not a name; accepted: text that is not empty")
            session.parts.tell("saved", variable, name, bool(save_backward))
        except ProbeFault:
            raise
        except TypeError as error:
            session.voice.say(f"save: {error}; left out", "save")
        except Exception as error:
            session.fault(error, f"save of {name}")
