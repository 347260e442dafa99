"""Preconditions of a comparison: both runs have the same model, the same batch and a common step.

Runs that violate one get a reason that says what to change; that is not a divergence.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from msprobe_megatron.analysis.compare.match import Pairs
from msprobe_megatron.analysis.compare.verdict.judge import distances
from msprobe_megatron.analysis.compare.verdict.tolerance import EPS, EPS32, Scene, is_data, tolerances
from msprobe_megatron.analysis.diagnose.summary import warnings
from msprobe_megatron.analysis.load.run import Run

_SAME_MODEL = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length", "num_experts")
_WEIGHT_ULPS = 4.0
"""Units in the last place by which the weights of a repetition may be off."""


def no_common_step(golden: Run, run: Run, step: int | None) -> str:
    """The reason why there is nothing to compare."""
    requested = "no step was recorded by both runs" if step is None else f"step {step} was not recorded by both runs"
    return f"{requested}: {golden.path} has {golden.steps or 'none'}, {run.path} has {run.steps or 'none'}"


def different_models(golden: Run, run: Run, pairs: Pairs) -> str:
    """The reason why these are not two runs of one model; empty if they are."""
    left, right = (side.facts.get("arguments", {}) for side in (golden, run))
    for name in _SAME_MODEL:
        if name in left and name in right and left[name] != right[name]:
            return f"the models differ: {name} is {left[name]} and {right[name]}"
    batches = [side.get("global_batch_size") for side in (left, right)]
    if None not in batches and batches[0] != batches[1]:
        return f"the batches differ: global_batch_size is {batches[0]} and {batches[1]}"
    lonely = lonely_weights(golden, run, pairs)
    if lonely.any() and "num_layers" not in left:
        name = pairs["name"][np.flatnonzero(lonely)[0]]
        return f"the models differ: {lonely.sum()} weights such as {name} are in one run only"
    if not pairs.in_both().any():
        return "no tensor of the same name was recorded by both runs; do their probe files select different modules?"
    return ""


def no_repetition(golden: Run, noise: Run, step: int | None, pairs: Pairs | None) -> str:
    """The reason why the distance of two runs is not the noise of one computation; empty if it is.

    A repetition has the golden run's model, data and weights, the last up to their last places (`noise_run: true`);
    the distance to any other run would excuse every fault.
    """
    named = f"--noise {noise.path} is not a repetition of {golden.path}"
    if pairs is None:
        return f"{named}: {no_common_step(golden, noise, step)}"
    different = different_models(golden, noise, pairs)
    if different:
        return f"{named}: {different}"
    average, _ = distances(pairs)
    first = pairs["step"] == pairs["step"].min()
    if (average[first & is_data(pairs)] > 0).any():
        return f"{named}: its input data differ"
    own = np.array([EPS.get(dtype, EPS32) for dtype in pairs.both("dtype").left])
    limit = tolerances(pairs, Scene.of(golden, noise, pairs)).average + _WEIGHT_ULPS * own
    beyond = first & pairs.in_both() & (pairs["kind"] == "parameter") & (average > limit)
    if beyond.any():
        worst = int(np.where(beyond, average, -1.0).argmax())
        return f"{named}: its weights differ, {pairs['name'][worst]} by {100 * average[worst]:.2g} %"
    return ""


def lonely_weights(golden: Run, run: Run, pairs: Pairs) -> npt.NDArray[np.bool_]:
    """Weights that only one run has although both recorded all of theirs; a monitor may have none of a step."""
    if not (_recorded_all(golden) and _recorded_all(run)):
        return np.zeros(len(pairs), bool)
    alike = np.isin(pairs["step"], golden.dumped_steps) == np.isin(pairs["step"], run.dumped_steps)
    lonely: npt.NDArray[np.bool_] = ~pairs.in_both() & (pairs["kind"] == "parameter") & alike
    for step in set(pairs["step"][lonely]):
        if _without_weights(pairs, step) is not None:
            lonely &= pairs["step"] != step
    return lonely


def no_weights(golden: Run, run: Run, pairs: Pairs) -> str:
    """Says that a run has none of its weights in a step that both dumped: it stopped before; empty if none has."""
    if not (_recorded_all(golden) and _recorded_all(run)):
        return ""
    for step in sorted(set(golden.dumped_steps) & set(run.dumped_steps) & set(pairs["step"].tolist())):
        side = _without_weights(pairs, step)
        if side is not None:
            lacking = (golden, run)[side]
            causes = [text for text in warnings(lacking) if "stopped" in text] or ["it did not reach its end"]
            return f"{lacking.path} holds no weights of step {step}: {causes[0]}"
    return ""


def _without_weights(pairs: Pairs, step: int) -> int | None:
    """0 or 1 for the run that has no weight at all of this step where the other has; else None."""
    weights = (pairs["kind"] == "parameter") & (pairs["step"] == step)
    held = [bool(pairs[name][weights].astype(bool).any()) for name in ("left_has", "right_has")]
    return held.index(False) if held[0] != held[1] else None


def lonely_biases(pairs: Pairs) -> npt.NDArray[np.bool_]:
    """Biases that a module returned in one run only, although both recorded its output and both record biases.

    A run of an earlier release has no rows of returned biases at all.
    """
    outputs = (pairs["kind"] == "activation") & (pairs["io"] == "output")
    biases = outputs & (pairs["path"] == "1") & (pairs["tokens"] == "fixed")
    if not (biases & pairs.in_both()).any():
        return np.zeros(len(pairs), bool)
    place = ("step", "microbatch", "phase", "name")
    both = outputs & (pairs["path"] == "0") & pairs.in_both()
    known = set(zip(*(pairs[column][both].tolist() for column in place), strict=True))
    lonely: npt.NDArray[np.bool_] = biases & ~pairs.in_both()
    for i in np.flatnonzero(lonely):
        lonely[i] = tuple(pairs[column][i] for column in place) in known
    return lonely


def _recorded_all(run: Run) -> bool:
    """True if the probe file selected every module of every rank."""
    content = run.facts.get("probe", {}).get("content", {})
    dump = content.get("dump") or {}
    return content.get("ranks", "all") == "all" and not dump.get("list") and dump.get("layers") is None
