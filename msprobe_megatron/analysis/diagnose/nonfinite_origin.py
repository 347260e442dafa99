"""Origin of a non-finite value: a weight, the data, an operator, the communication, or a reduction of gradients.

It follows from the inputs of the first tensor that holds one. The input of a pipeline stage was sent by the previous
stage; if that stage's output is finite, the communication introduced the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msprobe_megatron.analysis.compare.match import Pairs
from msprobe_megatron.analysis.compare.verdict.causes import culprit, last_sample
from msprobe_megatron.analysis.compare.verdict.tolerance import is_data
from msprobe_megatron.analysis.load.run import Run
from msprobe_megatron.topology.layers import layer_of

# Modules that end in a reduction over tensor-parallel ranks.
_REDUCING = ("RowParallelLinear", "VocabParallelEmbedding")


@dataclass(frozen=True)
class Origin:
    """Where a value came from. `source`: weight, data, operator, communication, reduction or loss."""

    source: str
    module: str
    words: str
    sure: str


@dataclass(frozen=True)
class FirstNonFinite:
    """The first tensor with a NaN or an infinity, and its origin."""

    index: int
    origin: Origin
    what: str
    count: int
    affected: int


def first_non_finite(run: Run, pairs: Pairs, bad: Sequence[int]) -> FirstNonFinite | None:
    """The first of the tensors `bad`, which are in causal order; None if there is none."""
    if not bad:
        return None
    first, total = bad[0], non_finite_counts(pairs)
    origin = _source(run, pairs, first, total)
    return FirstNonFinite(first, origin, holds(pairs, first), int(total[first]), len(bad))


def holds(pairs: Pairs, i: int) -> str:
    """How many elements of a tensor are NaN and infinite."""
    words = {"n_nan": "NaN", "n_posinf": "+Inf", "n_neginf": "-Inf"}
    names = [f"{int(n)} {word}" for column, word in words.items() if (n := np.nan_to_num(pairs.both(column).left[i]))]
    return ", ".join(names) or "not on every replica"


def non_finite_counts(pairs: Pairs) -> npt.NDArray[np.float64]:
    """Number of NaN and infinite elements of each tensor, on the worst of the ranks that hold the same part."""
    total: npt.NDArray[np.float64] = np.nan_to_num(pairs.both("bad").left.astype(np.float64))
    return total


def _source(run: Run, pairs: Pairs, i: int, total: npt.NDArray[np.float64]) -> Origin:
    kind, name, io = (str(pairs[column][i]) for column in ("kind", "name", "io"))
    module = culprit(kind, name, io)
    if kind == "parameter":
        return Origin("weight", module, "The weight itself is non-finite, before any computation.", "certain")
    if is_data(pairs)[i]:
        return Origin("data", "data", "It is in the input batch.", "certain")
    if kind not in ("activation", "gradient"):
        words = "All activation gradients are finite: it appeared while weight gradients were accumulated or reduced."
        return Origin("reduction", module, words, "likely")
    if (kind == "activation") == (io == "input"):
        return _arrived(run, name, kind, module)
    return _made(pairs, i, module, total)


def _arrived(run: Run, name: str, kind: str, module: str) -> Origin:
    """Origin of the input of a module when everything before it is finite."""
    if _at_boundary(run, name, kind):
        sender = "previous" if kind == "activation" else "next"
        words = f"It came from the {sender} pipeline stage, which sent finite values: the communication introduced it."
        return Origin("communication", name, words, "likely")
    if name == "model":
        return Origin("loss", "loss", "The gradient of the loss is non-finite.", "likely")
    words = f"It appeared inside {module}, between its submodules; the inputs of {module} are finite."
    return Origin("operator", module, words, "likely")


def _made(pairs: Pairs, i: int, module: str, total: npt.NDArray[np.float64]) -> Origin:
    """Origin of a module's own result."""
    if pairs["kind"][i] == "activation" and pairs["op"][i].endswith(_REDUCING) and pairs.both("d_counts").left[i] > 0:
        words = f"{module} reduces its output over ranks that must all get the same sum, and only some of them hold it."
        return Origin("communication", module, words, "likely")
    inputs = _inputs(pairs, i)
    if not len(inputs):
        return Origin("operator", module, "Its inputs were not recorded, so it may originate upstream.", "possible")
    if total[inputs].sum() == 0:
        all_of_them = "The recorded input" if len(inputs) == 1 else f"All {len(inputs)} recorded inputs"
        are = "is" if len(inputs) == 1 else "are"
        words = f"{all_of_them} of {module} {are} finite: the operator produced it."
        return Origin("operator", module, words, "certain")
    return Origin("operator", module, "Some of its inputs are non-finite too.", "possible")


def _inputs(pairs: Pairs, i: int) -> npt.NDArray[np.int64]:
    """Recorded inputs of this result of a module: same samples, same name, the other io."""
    side = "input" if pairs["kind"][i] == "activation" else "output"
    same = pairs["io"] == side
    for column in ("name", "kind", "step", "phase"):
        same &= pairs[column] == pairs[column][i]
    samples = last_sample(pairs)
    return np.flatnonzero(same & (samples == samples[i]))


def _at_boundary(run: Run, name: str, kind: str) -> bool:
    """True if a layer is the first (for a gradient: the last) of a stage that does not begin (end) the model."""
    layer = layer_of(name)
    if layer is None or not name.endswith(f"layers.{layer}"):
        return False
    for facts in run.ranks.values():
        for chunk in facts.get("chunks", []):
            layers = chunk.get("layers") or [None]
            if kind == "activation" and layers[0] == layer and not chunk.get("first"):
                return True
            if kind == "gradient" and layers[-1] == layer and not chunk.get("last"):
                return True
    return False
