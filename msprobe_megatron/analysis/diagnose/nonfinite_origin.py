"""Source of a non-finite number: a weight, the data, an operator, the communication, or a reduction of gradients.

Follows from what went into the first tensor that holds one. What a stage of the pipeline receives was sent by the
stage before it; if that stage's output is finite, the number arose on the way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msprobe_megatron.analyse.causes import culprit
from msprobe_megatron.analyse.load import Run
from msprobe_megatron.analyse.match import Pairs
from msprobe_megatron.analyse.order import last_sample
from msprobe_megatron.analyse.tolerance import is_data
from msprobe_megatron.topology.layers import layer_of

# Modules that end in a reduction over tensor-parallel ranks.
_REDUCING = ("RowParallelLinear", "VocabParallelEmbedding")


@dataclass(frozen=True)
class Origin:
    """Where a number came from. `source`: weight, data, operator, communication, reduction or loss."""

    source: str
    module: str
    words: str
    sure: str


@dataclass(frozen=True)
class NonFinite:
    """The first tensor with a NaN or an infinity, and where it came from."""

    index: int
    origin: Origin
    what: str
    count: int
    affected: int


def first_non_finite(run: Run, pairs: Pairs, order: npt.NDArray[np.int64]) -> NonFinite | None:
    """The earliest in order of cause, or None if every recorded number is finite.

    Example::

        found = first_non_finite(run, pairs, causal_order(pairs, forward_places(run)))
        found.origin.source     # "operator"
    """
    total = non_finite_counts(pairs)
    bad = [int(i) for i in order if total[i] > 0]
    if not bad:
        return None
    first = bad[0]
    words = {"n_nan": "NaN", "n_posinf": "+Inf", "n_neginf": "-Inf"}
    names = [f"{int(n)} {word}" for column, word in words.items() if (n := np.nan_to_num(pairs[f"{column}_l"][first]))]
    what = ", ".join(names) or "not on every rank that should hold the same"
    origin = _source(run, pairs, first, total)
    return NonFinite(first, origin, what, int(total[first]), len(bad))


def non_finite_counts(pairs: Pairs) -> npt.NDArray[np.float64]:
    """How many elements of each tensor are NaN or infinite, on the worst of the ranks that hold the same part."""
    total: npt.NDArray[np.float64] = np.nan_to_num(pairs["bad_l"].astype(np.float64))
    return total


def _source(run: Run, pairs: Pairs, i: int, total: npt.NDArray[np.float64]) -> Origin:
    kind, name, io = (str(pairs[column][i]) for column in ("kind", "name", "io"))
    module = culprit(kind, name, io)
    if kind == "parameter":
        return Origin("weight", module, "The weight itself holds it, before anything was computed.", "certain")
    if is_data(pairs)[i]:
        return Origin("data", "data", "It came with the batch: the model was given it.", "certain")
    if kind not in ("activation", "gradient"):
        words = "Every recorded activation gradient is finite: it arose where weight gradients are added up or reduced."
        return Origin("reduction", module, words, "likely")
    if (kind == "activation") == (io == "input"):
        return _arrived(run, name, kind, module)
    return _made(pairs, i, module, total)


def _arrived(run: Run, name: str, kind: str, module: str) -> Origin:
    """A tensor that was given to a module, and nothing before it was bad."""
    if _at_boundary(run, name, kind):
        sender = "the stage before" if kind == "activation" else "the stage after"
        words = f"It arrived from {sender} in the pipeline, which sent finite numbers: the communication made it."
        return Origin("communication", name, words, "likely")
    if name == "model":
        return Origin("loss", "loss", "The gradient that the loss gives is not finite.", "likely")
    words = f"It arose inside {module}, between its children; what went into it is finite."
    return Origin("operator", module, words, "likely")


def _made(pairs: Pairs, i: int, module: str, total: npt.NDArray[np.float64]) -> Origin:
    """A module's own result."""
    if pairs["kind"][i] == "activation" and pairs["op"][i].endswith(_REDUCING) and pairs["d_counts_l"][i] > 0:
        words = f"{module} adds up over ranks that must all get the same sum, and only some of them hold it."
        return Origin("communication", module, words, "likely")
    inputs = _inputs(pairs, i)
    if not len(inputs):
        return Origin("operator", module, "Its inputs were not recorded, so it may have come from before.", "possible")
    if total[inputs].sum() == 0:
        all_of_them = "The recorded input" if len(inputs) == 1 else f"All {len(inputs)} recorded inputs"
        are = "is" if len(inputs) == 1 else "are"
        words = f"{all_of_them} of {module} {are} finite: the operator made it."
        return Origin("operator", module, words, "certain")
    return Origin("operator", module, "Some of its inputs hold one too.", "possible")


def _inputs(pairs: Pairs, i: int) -> npt.NDArray[np.int64]:
    """What went into this result of a module: in the same samples, under the same name, on the other side."""
    side = "input" if pairs["kind"][i] == "activation" else "output"
    same = pairs["io"] == side
    for column in ("name", "kind", "step", "phase"):
        same &= pairs[column] == pairs[column][i]
    samples = last_sample(pairs)
    return np.flatnonzero(same & (samples == samples[i]))


def _at_boundary(run: Run, name: str, kind: str) -> bool:
    """Whether a layer is the first (for a gradient: the last) of a stage that does not begin (end) the model."""
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
