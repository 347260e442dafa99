"""Laws of a transformer layer: the residual stream adds up, and norms put out what their weights allow."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from msprobe_megatron.analysis.laws.law import Breach, Law, NotChecked, at, moment
from msprobe_megatron.analysis.laws.scene import Row, Scene, Step

_NORMS = ("RMSNorm", "LayerNorm", "FusedLayerNorm", "WrappedTorchNorm")
_PARTS = {"input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp"}


def residual(scene: Scene) -> list[Breach]:
    """Input plus attention is what the second norm takes in; that plus the MLP is what the layer puts out."""
    if scene.argument("hidden_dropout") != 0:
        raise NotChecked("a model without hidden dropout, and the training arguments")
    found, looked = [], 0
    for step in scene.steps:
        biases = _biases(step)
        for rows in _layers(step):
            layer = rows["in"].name
            first = [rows.get("in"), rows.get("attention"), rows.get("middle")]
            second = [rows.get("middle"), rows.get("mlp"), rows.get("out")]
            for parts, bias_name in ((first, "self_attention.linear_proj"), (second, "mlp.linear_fc2")):
                known = [row for row in parts if row is not None]
                if len(known) != 3 or len({row.numel for row in known}) != 1:
                    continue
                bias = biases.get((known[0].rank, f"{layer}.{bias_name}"))
                if bias is None:
                    continue
                looked += 1
                start, added, end = known
                tokens = start.numel / start.shape[-1]
                wanted = start.sum + added.sum + tokens * bias
                epsilon = max(row.epsilon for row in known)
                # Roundings of single elements are independent, save those of tokens that are alike.
                room = epsilon * (24 * max(end.norm, start.norm) + 0.02 * max(end.spread, start.spread)) + 1e-12
                if abs(end.sum - wanted) > room:
                    found.append((end, wanted, layer, start, added))
    if not looked:
        raise NotChecked("the parts of plain transformer layers and their biases: dump: {level: L0}")
    if not found:
        return []
    end, wanted, layer, start, added = min(found, key=lambda item: (item[0].step, item[0].microbatch or 0, item[0].seq))
    text = (
        f"{layer}: {_what(start)} plus {_what(added)} sums to {wanted:.6g}, {_what(end)} to {end.sum:.6g}"
        f" ({moment(end)}, rank {end.rank}); {len(found)} of {looked} sums in all"
    )
    return [Breach(text, at(end, value=end.sum, expected=wanted, tensors=len(found)))]


def _what(row: Row) -> str:
    return f"{row.name.rpartition('.')[2]} {row.io}" if not row.name.rpartition(".")[2].isdigit() else f"its {row.io}"


def _layers(step: Step) -> list[dict[str, Row]]:
    """Rows of plain layers: one entry a layer, rank and microbatch."""
    found: dict[tuple[Any, ...], dict[str, Row]] = defaultdict(dict)
    children: dict[str, set[str]] = defaultdict(set)
    for row in step.of("activation"):
        if row.phase != "forward" or row.microbatch is None:
            continue
        head, _, leaf = row.name.rpartition(".")
        if row.op == "TransformerLayer" and leaf.isdigit():
            part = "in" if (row.io, row.path) == ("input", "hidden_states") else ""
            part = part or ("out" if row.io == "output" and row.path in ("", "0") else "")
            layer = row.name
        else:
            layer, number = head, head.rpartition(".")[2]
            if not number.isdigit():
                continue
            children[layer].add(leaf)
            part = ""
            if leaf in ("self_attention", "mlp") and row.io == "output" and row.path in ("", "0"):
                part = {"self_attention": "attention"}.get(leaf, leaf)
            elif leaf == "pre_mlp_layernorm" and row.io == "input":
                part = "middle"
        if part:
            found[row.rank, row.vpp, row.microbatch, layer].setdefault(part, row)
    return [parts for (*_, layer), parts in found.items() if "in" in parts and children[layer] <= _PARTS]


def _biases(step: Step) -> dict[tuple[int, str], float]:
    """Sum of the bias that is added after a module: 0 where its weight was recorded and no bias was."""
    found: dict[tuple[int, str], float] = {}
    for row in step.of("parameter"):
        module, _, leaf = row.name.rpartition(".")
        if row.path:
            continue
        if leaf == "bias":
            found[row.rank, module] = row.sum
        else:
            found.setdefault((row.rank, module), 0.0)
            # Experts add their own biases inside.
            layer = module.partition(".mlp.")[0]
            if ".mlp.experts" in module or ".mlp.router" in module:
                found.setdefault((row.rank, f"{layer}.mlp.linear_fc2"), 0.0)
    return found


def normalised(scene: Scene) -> list[Breach]:
    """The mean square of what a norm puts out lies between those of its weights."""
    if scene.argument("apply_layernorm_1p"):
        raise NotChecked("norms whose weights are not stored less one")
    found, looked = [], 0
    for step in scene.steps:
        weights = {(row.rank, row.name): row for row in step.of("parameter") if not row.path}
        inputs = {
            (row.rank, row.microbatch, row.name): row
            for row in step.of("activation")
            if row.op in _NORMS and row.io == "input" and row.phase == "forward"
        }
        for row in step.of("activation"):
            if row.op not in _NORMS or row.io != "output" or row.phase != "forward" or row.microbatch is None:
                continue
            weight = weights.get((row.rank, f"{row.name}.weight"))
            bias = weights.get((row.rank, f"{row.name}.bias"))
            given = inputs.get((row.rank, row.microbatch, row.name))
            if weight is None or weight.numel != row.shape[-1] or given is None or given.numel == 0:
                continue
            looked += 1
            size = math.sqrt(row.sumsq / row.numel)
            shift = bias.absmax if bias is not None else 0.0
            most = weight.absmax * (1 + 4 * row.epsilon + 1e-3) + shift
            least = (weight.min if weight.min > 0 else 0.0) * 0.3 - shift
            # A row of nothing but small numbers is not brought to size: the epsilon of the norm holds it back.
            strong = given.sumsq / given.numel > 30 * float(scene.argument("norm_epsilon") or 1e-4)
            if size > most or (strong and size < least and given.zeros < 0.1 * given.numel):
                found.append((row, size, weight))
    if not looked:
        raise NotChecked("norms and their weights: dump: {level: L0}")
    if not found:
        return []
    row, size, weight = found[0]
    text = (
        f"{row.name} puts out a root mean square of {size:.4g} where its weights, {weight.min:.4g} to"
        f" {weight.max:.4g}, allow no such size ({moment(row)}, rank {row.rank}); {len(found)} in all"
    )
    return [Breach(text, at(row, value=size, tensors=len(found)))]


LAWS = (
    Law(
        "residual-sum",
        "a layer's input, attention, MLP and biases sum to its output",
        "a residual left out, taken after the norm or scaled, a bias left out or added on every rank",
        "dump: {level: L0}, no hidden dropout",
        "nothing beyond the dump",
        residual,
        "record the calls of the layer that is named: dump: {level: mix, layers: [N]}",
    ),
    Law(
        "norm-size",
        "the size of what a norm puts out is that of its weights",
        "a norm left out, without its root, or with weights stored less one",
        "dump: {level: L0}",
        "nothing beyond the dump",
        normalised,
        "look at the norm that is named",
    ),
)
