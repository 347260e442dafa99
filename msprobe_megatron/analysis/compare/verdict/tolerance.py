"""Expected rounding error between two correct runs: from dtype, reduction length, depth and steps; nothing to tune.

All errors are relative, in units that cannot vanish by cancellation: norms against the norm, sums against
sqrt(numel * sum of squares), extremes against the largest magnitude.

- One operation rounds its result to eps of the coarsest dtype of the run, and its reduction of length K, done in
  float32, adds eps32 * sqrt(K).
- Errors of many operations add like a random walk: sqrt(1 + 2 d) at depth d, counted in layers from the data
  forward to the loss and on backward. A fault is systematic and soon far above that.
- Extremes are single elements and may be off by all of that. Norms and sums are over all elements, whose errors
  cancel: a tenth of it, the part that neighbouring elements share, and 4 / sqrt(numel), the part that they do not.
- float16 has no numbers between 0 and 2**-24: small gradients are off by that quantum, divided by the loss scale.
- Weights are equal bit for bit at the first step; what differs is the rounding of their statistics.
- An Adam step moves a weight by lr whatever the size of its gradient, so gradients inside the noise move it at random:
  of relative noise x, a share x of the elements, hence lr * sqrt(x) in root mean square, each step.
- Clipping multiplies every gradient by the same number, which has the rounding error of the norm: what was clipped is
  off by that error as a whole. How far the two norms of a step differ was recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_megatron.analysis.compare.match import Floats, Pair, Pairs
from msprobe_megatron.analysis.load.run import Run
from msprobe_megatron.topology.layers import layer_of

EPS32 = 2.0**-23
EPS = {
    "float64": 2.0**-52,
    "float32": EPS32,
    "tf32": 2.0**-10,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2,
    "float8_e4m3fnuz": 2.0**-3,
    "float8_e5m2fnuz": 2.0**-2,
}
_LARGEST = 0.25
_MARGIN = 1.5
_SHARED = 0.1
_OWN = 4.0
_MEASURING = 2 * EPS32  # statistics are summed in float32 inside a piece of a tensor
_EXACT = 1e-12
_DATA = ("input_ids", "labels", "position_ids", "loss_mask", "attention_mask")


@dataclass(frozen=True)
class Scene:
    """Properties of a pair of runs that its tolerances depend on, besides the tensors themselves."""

    eps: float
    layers: int
    reduction: float
    tokens: float
    first_step: int
    lr: float
    rerouted: float = 0.0
    """Relative change of gradients by tokens that were routed otherwise."""

    @classmethod
    def of(cls, golden: Run, run: Run, pairs: Pairs) -> Scene:
        """From the facts of both runs and the dtypes of their activations."""
        arguments = golden.facts.get("arguments", {}), run.facts.get("arguments", {})

        def largest(*names: str, otherwise: float) -> float:
            found = [a[n] for a in arguments for n in names if isinstance(a.get(n), int | float) and a[n]]
            return float(max(found, default=otherwise))

        activations = pairs["kind"] == "activation"
        seen = {dtype for column in pairs.both("dtype") for dtype in column[activations]}
        layers = [n for name in set(pairs["name"]) if (n := layer_of(name)) is not None]
        starts = [a["iteration"] for a in arguments if isinstance(a.get("iteration"), int)]
        sequence = largest("seq_length", otherwise=4096)
        return cls(
            eps=max((EPS[dtype] for dtype in seen if dtype in EPS), default=EPS32),
            layers=max(layers, default=-1) + 1,
            reduction=largest("hidden_size", "ffn_hidden_size", "seq_length", otherwise=4096),
            tokens=sequence * largest("global_batch_size", otherwise=1024),
            first_step=max(starts, default=0),
            lr=largest("lr", otherwise=1e-3),
        )


def is_data(pairs: Pairs) -> npt.NDArray[np.bool_]:
    """Entries that are the model's own inputs: the batch."""
    inputs = (pairs["name"] == "model") & (pairs["io"] == "input") & np.isin(pairs["path"], _DATA)
    found: npt.NDArray[np.bool_] = inputs & (pairs["kind"] == "activation") | (pairs["kind"] == "data")
    return found


def is_updated_weight(pairs: Pairs) -> npt.NDArray[np.bool_]:
    """Weights that the monitor read after the optimizer: results of the step, where all others are its inputs."""
    found: npt.NDArray[np.bool_] = (pairs["kind"] == "parameter") & (pairs["path"] == "after")
    return found


def is_gradient_norm(pairs: Pairs) -> npt.NDArray[np.bool_]:
    """The norm of all gradients, as the optimizer computed it."""
    found: npt.NDArray[np.bool_] = (pairs["kind"] == "loss") & (pairs["name"] == "grad_norm")
    return found


def depths(pairs: Pairs, layers: int) -> Floats:
    """Number of layers between the data and each tensor, on the way forward to the loss and back."""
    known: dict[str, int] = {}
    for name in set(pairs["name"]):
        layer = layer_of(name)
        before = name.startswith(("embedding", "rotary", "model"))
        known[name] = layer + 1 if layer is not None else 0 if before else layers + 1
    forward = np.array([known[name] for name in pairs["name"]], np.float64)
    # The model's output is the loss itself.
    forward[(pairs["name"] == "model") & (pairs["io"] == "output")] = layers + 1
    backward = np.isin(pairs["kind"], ("gradient", "grad_reduced", "grad_clipped", "optimizer_state", "update"))
    found = np.where(backward, 2 * (layers + 1) - forward, forward)
    return np.where(is_gradient_norm(pairs), 2 * (layers + 1), found)


@dataclass
class Allowed:
    """Largest relative errors expected from rounding, one per tensor: of norm and sum, and of the extremes."""

    average: Floats
    extreme: Floats
    element: Floats
    """Of the norm of the difference, which sketches estimate: single elements in root mean square."""

    def at_least(self, average: Floats, extreme: Floats) -> Allowed:
        """The larger of these and measured ones."""
        return Allowed(
            np.maximum(self.average, average), np.maximum(self.extreme, extreme), np.maximum(self.element, extreme)
        )


def tolerances(pairs: Pairs, scene: Scene) -> Allowed:
    """The errors expected from rounding, for every pair."""
    kinds = pairs["kind"]
    weight_gradient = np.isin(kinds, ("grad_reduced", "grad_clipped", "optimizer_state", "update"))
    length = np.where(weight_gradient, scene.tokens, scene.reduction)
    depth = depths(pairs, scene.layers)
    noise = (scene.eps + EPS32 * np.sqrt(length)) * np.sqrt(1 + 2 * depth)
    parameters = kinds == "parameter"
    dtypes: Pair[Any] = pairs.both("dtype")
    own_eps = np.array([max(EPS.get(a, 0.0), EPS.get(b, 0.0)) for a, b in zip(*dtypes, strict=True)])
    same_dtype = dtypes.left == dtypes.right
    noise[parameters] = np.where(same_dtype, 0.0, own_eps)[parameters]
    # Every layer on the way has weights that have moved.
    drift = _drift(pairs, scene, parameters) * np.where(parameters, 1.0, np.sqrt(1 + depth / 2))
    updates = kinds == "update"
    noise[updates] = np.sqrt(np.minimum(noise[updates], 1.0))
    numel = np.maximum(np.nan_to_num(pairs.both("numel").left.astype(np.float64)), 1.0)
    share = np.minimum(_SHARED + _OWN / np.sqrt(numel), 1.0)
    noise += _quantum(pairs, numel)
    average = np.minimum(_MARGIN * (share * noise + drift + _MEASURING), _LARGEST)
    extreme = np.minimum(2 * _MARGIN * (noise + drift + _MEASURING), 2 * _LARGEST)
    clipped = _clipping(pairs, average)
    average, extreme = average + clipped, extreme + clipped
    whole_numbers = np.array([a not in EPS and a is not None for a in dtypes.left])
    exact = is_data(pairs) & whole_numbers
    average[exact] = extreme[exact] = _EXACT
    return Allowed(average, extreme, extreme)


def _clipping(pairs: Pairs, average: Floats) -> Floats:
    """Relative error of clipped gradients, and of moments made of them, from the rounding of the norm they share."""
    norms = is_gradient_norm(pairs)
    found = np.zeros(len(pairs))
    if not norms.any():
        return found
    left, right = (np.abs(side.astype(np.float64)) for side in pairs.both("sum"))
    with np.errstate(all="ignore"):
        error = np.nan_to_num(np.abs(left - right) / np.maximum(left, right))
    # A norm that differs by more than rounding is a finding of its own and no reason to expect less of others.
    error = np.where(norms, np.minimum(error, average), 0.0)
    scaled = np.isin(pairs["kind"], ("grad_clipped", "optimizer_state"))
    steps = pairs["step"]
    largest = 0.0
    for step in np.unique(steps):  # moments keep a part of all steps before
        largest = max(largest, float(error[steps == step].max()))
        found[scaled & (steps == step)] = 2 * largest  # the second moment has it twice
    return found


def _quantum(pairs: Pairs, numel: Floats) -> Floats:
    """Relative noise of tensors near the smallest number of their dtype, and of gradients computed from them."""
    with np.errstate(all="ignore"):
        quantum = np.maximum(*pairs.both("quantum").map(np.nan_to_num))
        own: Floats = np.nan_to_num(quantum * np.sqrt(numel) / np.sqrt(pairs.both("sumsq").left), posinf=1.0)
    if not own.any():
        return np.zeros(len(pairs))
    worst: dict[str, float] = {}
    for i in np.flatnonzero((pairs["kind"] == "gradient") & (own > 0)):
        # Digits lost in a gradient are lost in all gradients computed from it: those of its layer.
        layer = str(pairs["name"][i]).rpartition(".")[0]
        worst[layer] = max(worst.get(layer, 0.0), float(own[i]))
    weights = np.isin(pairs["kind"], ("grad_reduced", "grad_clipped", "optimizer_state"))
    for i in np.flatnonzero(weights):
        layer = str(pairs["name"][i]).rpartition(".")[0].rpartition(".")[0]
        own[i] = worst.get(layer, 0.0)
    return own


def _drift(pairs: Pairs, scene: Scene, parameters: npt.NDArray[np.bool_]) -> Floats:
    """Drift of the weights, through the optimizer, from rounding of gradients since the weights were equal."""
    # A weight that was read after the step of the optimizer has moved once more.
    steps = np.maximum(pairs["step"].astype(np.float64) - scene.first_step, 0) + is_updated_weight(pairs)
    gradient_noise = (scene.eps + EPS32 * np.sqrt(scene.tokens)) * np.sqrt(1 + 4 * (scene.layers + 1)) + scene.rerouted
    moved = steps * scene.lr * np.sqrt(gradient_noise)
    with np.errstate(all="ignore"):
        own = np.sqrt(pairs.both("sumsq").left / pairs.both("numel").left)
    matrices = parameters & np.array(
        [s is not None and len(s) > 1 for s in pairs.both("global_shape").left], dtype=bool
    )
    sizes = own[matrices & np.isfinite(own) & (own > 0)]
    typical = float(np.median(sizes)) if len(sizes) else 0.02
    size = np.where(parameters & np.isfinite(own) & (own > 0), own, typical)
    drift: Floats = moved / size
    return drift
