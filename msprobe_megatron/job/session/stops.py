"""Where and why a step ended before its time: one sentence from the exception that ended it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from torch import nn

from msprobe_megatron.topology import names

_LONGEST = 200


def describe_stop(error: BaseException, step: int, microbatch: int | None, chunks: Sequence[nn.Module]) -> str:
    """The step, the module that was running, the line that raised, and what it raised.

    Reads frames only; nothing of the model is called.
    """
    where = [f"step {step} stopped"]
    if microbatch is not None:
        where.append(f"in microbatch {microbatch}")
    inside, line = _place(error.__traceback__, chunks)
    if inside:
        where.append(f"inside {inside}")
    if line:
        where.append(f"({line})")
    said = str(error).strip().partition("\n")[0][:_LONGEST]
    what = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return f"{' '.join(where)}: {what}; the rest of the step is missing"


def _place(trace: TracebackType | None, chunks: Sequence[nn.Module]) -> tuple[str, str]:
    """Name of the innermost module of the model on the stack, or the backward pass; and the last line of all."""
    known = {id(entry.module): entry.name for chunk in chunks for entry in names.modules(chunk)}
    inside, line = "", ""
    while trace is not None:
        code = trace.tb_frame.f_code
        owner = trace.tb_frame.f_locals.get("self")
        inside = known.get(id(owner), inside) if isinstance(owner, nn.Module) else inside
        if code.co_name == "backward" and Path(code.co_filename).parts[-3:-1] == ("torch", "autograd"):
            inside = "the backward pass"
        line = f"{code.co_filename}:{trace.tb_lineno} {code.co_name}"
        trace = trace.tb_next
    return inside, line
