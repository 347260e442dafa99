"""Whether two runs are a pair at all: one model, one batch, a common step.

What is no pair gets a reason that says what to change; it is not a divergence.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from msprobe_megatron.analyse.judge import distances
from msprobe_megatron.analyse.load import Run
from msprobe_megatron.analyse.match import Pairs
from msprobe_megatron.analyse.tolerance import EPS, EPS32, Scene, is_data, tolerances

_LAST_PLACES = 4.0
"""Units in the last place by which the weights of a repetition may be off."""


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


def no_repetition(golden: Run, noise: Run, step: int | None, pairs: Pairs | None) -> str:
    """Why the distance of two runs is not the noise of one computation, or an empty text.

    A repetition has the golden run's model, data and weights, the last but for their last places (`noise_run: true`);
    the distance to anything else would excuse every fault.

    Example::

        no_repetition(golden, noise, None, match(golden, noise))
    """
    named = f"--noise {noise.path} is no repetition of {golden.path}"
    if pairs is None:
        return f"{named}: {no_common_step(golden, noise, step)}"
    different = different_models(golden, noise, pairs)
    if different:
        return f"{named}: {different}"
    average, _ = distances(pairs)
    first = pairs["step"] == pairs["step"].min()
    if (average[first & is_data(pairs)] > 0).any():
        return f"{named}: it was given other data"
    own = np.array([EPS.get(dtype, EPS32) for dtype in pairs["dtype_l"]])
    limit = tolerances(pairs, Scene.of(golden, noise, pairs)).average + _LAST_PLACES * own
    both = pairs["left_has"].astype(bool) & pairs["right_has"].astype(bool)
    apart = first & both & (pairs["kind"] == "parameter") & (average > limit)
    if apart.any():
        worst = int(np.where(apart, average, -1.0).argmax())
        return f"{named}: its weights are others, {pairs['name'][worst]} by {100 * average[worst]:.2g} %"
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
