"""Hints: what a pattern of differences usually means. Words only; no verdict rests on them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from msprobe_megatron.analyse.causes import culprit
from msprobe_megatron.analyse.load import Run
from msprobe_megatron.analyse.match import Pairs
from msprobe_megatron.topology.layers import layer_of

_MANY = 0.9
_SPREAD = 0.02


def hints(golden: Run, run: Run, pairs: Pairs, states: Sequence[str], order: Sequence[int]) -> list[str]:
    """What to think of first; `order` are the tensors that differ by themselves, causes first.

    Example::

        hints(golden, run, pairs, states, by_themselves)    # ["all gradients are 2 times those of ..."]
    """
    found = [
        *_dropout(golden, run),
        *_padding(golden, run),
        *_layers(run),
        *_weights(pairs, states),
        *_factor(pairs, states),
    ]
    first = order[0] if order else None
    if first is not None and pairs["kind"][first] == "grad_reduced":
        found.append(
            "all recorded activations and activation gradients before it agree: look at how this weight's gradient"
            " is accumulated over microbatches and reduced over ranks"
        )
    if first is not None and pairs["kind"][first] in ("activation", "gradient") and _arrives(pairs, first):
        found.append(_feeds(*(str(pairs[column][first]) for column in ("kind", "name", "io"))))
    return found


def _feeds(kind: str, name: str, io: str) -> str:
    """Where to look when a tensor that arrives at a module differs and nothing before it does."""
    module = culprit(kind, name, io)
    if name.endswith(f"layers.{layer_of(name)}") or "." not in name or module == name:
        return "it is what arrives at the module: look at what feeds it (communication, residual, schedule)"
    return (
        f"it arises inside {module}, between its children: look at what is computed there (scale, mask, residual,"
        " activation function)"
    )


def doubled_layers(run: Run) -> dict[int, list[tuple[int, int]]]:
    """Layers that more than one stage holds, and the (rank, virtual stage) that do."""
    places: dict[int, dict[tuple[int, int], list[tuple[int, int]]]] = {}
    for rank, facts in sorted(run.ranks.items()):
        pp = int(facts.get("coordinates", {}).get("pp", 0))
        for chunk in facts.get("chunks", []):
            for layer in chunk.get("layers", []):
                stage = (pp, int(chunk.get("vpp", 0)))
                places.setdefault(int(layer), {}).setdefault(stage, []).append((rank, stage[1]))
    return {
        layer: [holder for holders in stages.values() for holder in holders]
        for layer, stages in places.items()
        if len(stages) > 1
    }


def _layers(run: Run) -> list[str]:
    return [
        f"layer {layer} is held by more than one stage: "
        + ", ".join(f"rank {rank} virtual stage {vpp}" for rank, vpp in holders)
        + "; look at the layer offset of the stages"
        for layer, holders in sorted(doubled_layers(run).items())[:2]
    ]


def _arrives(pairs: Pairs, i: int) -> bool:
    return bool((pairs["kind"][i] == "activation") == (pairs["io"][i] == "input"))


def _dropout(golden: Run, run: Run) -> list[str]:
    for side in (golden, run):
        section = side.facts.get("probe", {}).get("content", {}).get("reproduce")
        if isinstance(section, dict) and not section.get("dropout"):
            continue  # switched off by the kit
        for name in ("attention_dropout", "hidden_dropout"):
            if side.facts.get("arguments", {}).get(name):
                return [f"{name} is not 0 in {side.path}: random numbers differ between layouts; switch it off"]
    return []


def _padding(golden: Run, run: Run) -> list[str]:
    """Rows that only pad the vocabulary take part in the loss: other padding is another loss."""
    sizes = [side.facts.get("arguments", {}).get("padded_vocab_size") for side in (golden, run)]
    if not all(isinstance(size, int) for size in sizes) or sizes[0] == sizes[1]:
        return []
    return [
        f"the vocabulary is padded to {sizes[0]} and to {sizes[1]}, and the loss is taken over the padding too: choose"
        " --make-vocab-size-divisible-by so that both are padded alike"
    ]


def _weights(pairs: Pairs, states: Sequence[str]) -> list[str]:
    weights = np.flatnonzero((pairs["kind"] == "parameter") & (pairs["step"] == pairs["step"].min())).tolist()
    differ = sum(states[i] == "diverged" for i in weights)
    if len(weights) and differ > 0.5 * len(weights):
        return [f"{differ} of {len(weights)} weights differ from the start: load one checkpoint into both runs"]
    return []


def _factor(pairs: Pairs, states: Sequence[str]) -> list[str]:
    """All gradients off by one factor: the loss is scaled otherwise."""
    gradients = np.flatnonzero((pairs["kind"] == "gradient") & (pairs["step"] == pairs["step"].min())).tolist()
    differ = [i for i in gradients if states[i] in ("diverged", "inherited")]
    if not len(gradients) or len(differ) < _MANY * len(gradients):
        return []
    with np.errstate(all="ignore"):
        ratios = np.sqrt(pairs["sumsq_r"][differ] / pairs["sumsq_l"][differ])
    ratios = ratios[np.isfinite(ratios)]
    if not len(ratios):
        return []
    middle = float(np.median(ratios))
    if middle == 0 or abs(middle - 1) < 2 * _SPREAD or np.mean(np.abs(ratios / middle - 1) < _SPREAD) < _MANY:
        return []
    return [f"all gradients are {middle:.4g} times those of the golden run: look at how the loss is averaged"]
