"""Which non-finite values matter: those that reached the loss or a gradient, before those that did not.

Healthy models hold non-finite values that nothing uses: the log-only z-loss of a router (0/0), a buffer that a
collective is still filling, the -Inf of an additive mask. A step whose loss and gradients are recorded and finite has
only such values; the same tensors are passed over in other steps, too, as long as anything else there is non-finite.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_megatron.analysis.compare.match import Pairs
from msprobe_megatron.analysis.compare.verdict.causes import culprit, last_sample
from msprobe_megatron.analysis.compare.verdict.tolerance import is_gradient_norm

Flags = npt.NDArray[np.bool_]
_GRADIENTS = ("gradient", "grad_reduced", "grad_clipped")
_MASK_WORDS = ("mask", "alibi")
_MASK_CALLS = ("masked_fill", "masked_fill_", "triu", "tril", "triu_", "tril_", "full", "full_like")
_SQUARE = 2


class Reach(NamedTuple):
    """Tensors with a NaN or an infinity, by index and in causal order."""

    reached: list[int]
    """Those that reached the loss or a gradient, or may have: the first is the one to look at."""
    unused: list[int]
    """Those of steps whose loss and gradients are finite."""


def sort_by_reach(pairs: Pairs, order: npt.NDArray[np.int64], counts: npt.NDArray[np.float64]) -> Reach:
    """Tell the values that matter from those that do not; `counts` are the non-finite elements of each tensor."""
    bad = (counts > 0) & ~_is_mask(pairs)
    clean = _clean_steps(pairs, counts > 0)
    steps = pairs["step"].astype(np.int64)
    keys = list(zip(*(pairs[column].tolist() for column in ("kind", "name", "io", "path")), strict=True))
    unused = [int(i) for i in order if bad[i] and int(steps[i]) in clean]
    harmless = {keys[i] for i in unused}
    rest = [int(i) for i in order if bad[i] and int(steps[i]) not in clean]
    if not rest:
        return Reach([], unused)
    # What is harmless elsewhere is all there is if nothing else is left.
    chosen = [i for i in rest if keys[i] not in harmless] or rest
    contained = _contained(pairs, counts > 0)
    left = [i for i in chosen if not contained[i]]
    # A value that stayed in its module did not go on by itself, if another one did. If none did, it may have reached a
    # gradient all the same: where what hid it is differentiated, or as a loss of its own.
    went_on = any(pairs["kind"][i] == "activation" for i in left)
    return Reach(left if went_on else chosen, unused)


def _clean_steps(pairs: Pairs, bad: Flags) -> set[int]:
    """Steps with a loss and gradients that are all finite, and with nothing non-finite in a weight or its update."""
    kinds, steps = pairs["kind"], pairs["step"].astype(np.int64)
    norm = is_gradient_norm(pairs)
    loss = (kinds == "loss") & ~norm & (pairs["name"] != "loss_scale")
    gradient = np.isin(kinds, _GRADIENTS) | norm
    dirty = {int(step) for step in steps[bad & (kinds != "activation")]}
    return ({int(step) for step in steps[loss]} & {int(step) for step in steps[gradient]}) - dirty


def _contained(pairs: Pairs, bad: Flags) -> Flags:
    """Values of the forward inside of a module whose own output is recorded and finite."""
    samples, names, ios = last_sample(pairs), pairs["name"], pairs["io"]
    outputs: dict[tuple[Any, Any, str], bool] = {}
    forward = (pairs["kind"] == "activation") & (pairs["phase"] == "forward")
    for i in np.flatnonzero(forward & (ios == "output")):
        if "/" not in str(names[i]):
            key = (pairs["step"][i], samples[i], str(names[i]))
            outputs[key] = outputs.get(key, True) and not bad[i]
    found = np.zeros(len(pairs), dtype=bool)
    for i in np.flatnonzero(forward & bad):
        name = str(names[i])
        holder = name.partition("/")[0] if "/" in name else culprit("activation", name, "input")
        found[i] = outputs.get((pairs["step"][i], samples[i], holder), False)
    return found


def _is_mask(pairs: Pairs) -> Flags:
    """Tensors of the forward whose only non-finite values are the -Inf of a mask that is added to scores."""
    columns = ("n_nan", "n_posinf", "n_neginf", "n_zero", "numel")
    nan, up, down, zero, numel = (np.nan_to_num(pairs.both(c).left.astype(np.float64)) for c in columns)
    found: Flags = (pairs["kind"] == "activation") & (nan + up == 0) & (down > 0)
    for i in np.flatnonzero(found):
        words = f"{pairs['name'][i].rpartition('/')[2]} {pairs['path'][i]}".lower()
        call = str(pairs["op"][i]).rpartition(".")[2]
        found[i] = (
            any(word in words for word in _MASK_WORDS)
            or call in _MASK_CALLS
            or zero[i] + down[i] == numel[i]
            or _is_causal(pairs.both("global_shape").left[i], down[i], numel[i])
        )
    return found


def _is_causal(shape: Any, infinite: float, numel: float) -> bool:
    """Whether as many elements are infinite as stand above the diagonals of square matrices."""
    sizes = [int(size) for size in shape] if shape is not None else []
    if len(sizes) < _SQUARE or sizes[-1] != sizes[-2] or sizes[-1] < _SQUARE:
        return False
    return infinite == numel / sizes[-1] ** 2 * sizes[-1] * (sizes[-1] - 1) / 2
