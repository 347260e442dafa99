"""Whether two runs are a pair at all: one model, one batch, a common step.

What is no pair gets a reason that says what to change; it is not a divergence.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from msprobe_megatron.analyse.load import Run
from msprobe_megatron.analyse.match import Pairs


def no_common_step(golden: Run, run: Run, step: int | None) -> str:
    """Why there is nothing to compare."""
    asked = "no step was recorded by both" if step is None else f"step {step} was not recorded by both"
    return f"{asked}: {golden.path} has {golden.steps or 'none'}, {run.path} has {run.steps or 'none'}"


def different_models(golden: Run, run: Run, pairs: Pairs) -> str:
    """Why these are not two runs of one model, or an empty text."""
    left, right = (side.facts.get("arguments", {}) for side in (golden, run))
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length", "num_experts"):
        if name in left and name in right and left[name] != right[name]:
            return f"the models differ: {name} is {left[name]} and {right[name]}"
    batches = [side.get("global_batch_size") for side in (left, right)]
    if None not in batches and batches[0] != batches[1]:
        return f"the batches differ: global_batch_size is {batches[0]} and {batches[1]}"
    lonely = lonely_weights(golden, run, pairs)
    if lonely.any() and "num_layers" not in left:
        name = pairs["name"][np.flatnonzero(lonely)[0]]
        return f"the models differ: {lonely.sum()} weights such as {name} are in one run only"
    if not (pairs["left_has"].astype(bool) & pairs["right_has"].astype(bool)).any():
        return "no tensor of the same name was recorded by both; were different modules selected?"
    return ""


def lonely_weights(golden: Run, run: Run, pairs: Pairs) -> npt.NDArray[np.bool_]:
    """Weights that only one run has though both recorded all of theirs."""
    if not (_recorded_all(golden) and _recorded_all(run)):
        return np.zeros(len(pairs), bool)
    alone = pairs["left_has"].astype(bool) != pairs["right_has"].astype(bool)
    found: npt.NDArray[np.bool_] = alone & (pairs["kind"] == "parameter")
    return found


def _recorded_all(run: Run) -> bool:
    """Whether the probe file selected every module of every rank."""
    content = run.facts.get("probe", {}).get("content", {})
    dump = content.get("dump") or {}
    return content.get("ranks", "all") == "all" and not dump.get("list") and dump.get("layers") is None
