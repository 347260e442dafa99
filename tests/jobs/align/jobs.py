"""Runs of both sides, recorded in one process each: forked ranks record all pairs one after another."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.jobs.align.architectures import hugging_face, tokens
from tests.jobs.align.faults import FAULTS
from tests.jobs.align.megatron_side import build, converted, forward, initialize, load

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def probe(out: Path, **dump: Any) -> Any:
    from msprobe_megatron.config import from_document

    section = {"task": "tensor", "stacks": False, **dump}
    return from_document({"output": str(out), "forward_passes": "call", "dump": section}, "test")


def record(model: torch.nn.Module, out: Path, run: Any, **dump: Any) -> Any:
    """Record one pass of a model; returns what the pass returned."""
    from msprobe_megatron import attach

    with torch.no_grad(), attach(model, config=probe(out, **dump)) as session:
        result = run()
    assert not session.faults, session.faults
    return result


def record_hugging_face(root: str, names: list[str], dtypes: list[str]) -> None:
    for name in names:
        for dtype in dtypes:
            model = hugging_face(name, DTYPES[dtype])
            record(model, Path(root) / f"hf_{name}_{dtype}", lambda m=model: m(input_ids=tokens(), use_cache=False))


def record_megatron(root: str, names: list[str], dtypes: list[str], label: str, tp: int = 1, pp: int = 1) -> None:
    """Clean conversions, of any layout."""
    warnings.simplefilter("ignore")
    initialize(tp, pp)
    for name in names:
        for dtype in dtypes:
            model = build(name, DTYPES[dtype])
            load(model, converted(name, hugging_face(name, DTYPES[dtype]).state_dict()))
            record(model, Path(root) / f"{label}_{name}_{dtype}", lambda m=model: forward(m, tokens()))


def record_faults(root: str, faults: list[str]) -> None:
    """Conversions with a fault, on one rank in fp32."""
    warnings.simplefilter("ignore")
    initialize()
    for number, name in enumerate(FAULTS):
        if name not in faults:
            continue
        fault = FAULTS[name]
        weights = converted(fault.architecture, hugging_face(fault.architecture).state_dict())
        weights = {key: weight.clone() for key, weight in weights.items()}
        if fault.weights is not None:
            fault.weights(weights)
        model = build(fault.architecture, model_kwargs=fault.model, **fault.settings)
        load(model, weights)
        record(model, Path(root) / f"fault_{number}", lambda m=model: forward(m, tokens()))


def environment() -> None:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
