"""Laws of attention and positions: probabilities sum to one, no token sees the future, rotary tables are exact."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np

from msprobe_megatron.analysis.laws.law import Breach, Law, NotChecked, at, moment
from msprobe_megatron.analysis.laws.scene import Row, Scene, Step, spec_of

_SOFTMAX = "FusedScaleMaskSoftmax"


def _softmax(step: Step, io: str) -> list[Row]:
    return [
        row
        for row in step.of("activation")
        if row.op == _SOFTMAX and row.io == io and row.phase == "forward" and len(row.shape) == 4
    ]


def probabilities(scene: Scene) -> list[Breach]:
    """The probabilities of every query sum to one."""
    if scene.argument("softmax_type") not in (None, "vanilla"):
        raise NotChecked("attention with the plain softmax")
    found, looked = [], 0
    for step in scene.steps:
        for row in _softmax(step, "output"):
            looked += 1
            queries = row.numel / row.shape[-1]
            if abs(row.sum - queries) > max(1e-5, row.epsilon) * queries or row.min < 0 or row.max > 1 + 1e-3:
                found.append((row, row.sum / queries))
    if not looked:
        raise NotChecked("the softmax as a module of its own (not a fused attention): dump: {level: L0}")
    if not found:
        return []
    row, mean = found[0]
    text = f"the probabilities of {row.name} sum to {mean:.5g} a query, not to 1 ({moment(row)}, rank {row.rank})"
    return [Breach(f"{text}; {len(found)} in all", at(row, value=mean, expected=1.0))]


def no_future(scene: Scene) -> list[Breach]:
    """Where attention is causal, every probability of a later token is zero, and masks are alike in all layers."""
    found: list[tuple[Row, str]] = []
    looked = 0
    for step in scene.steps:
        groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
        for row in _softmax(step, "output"):
            axes = ("dp", "tp", "pp")
            groups[row.name, row.microbatch, tuple(scene.at(row.rank, axis) for axis in axes)].append(row)
        for rows in groups.values():
            batch, heads, _, keys = rows[0].shape
            queries = sum(row.shape[2] for row in rows)
            # Context-parallel ranks hold some of the queries each.
            if len(rows) != (scene.size("cp") if "cp" in spec_of(rows[0].shard).cut_axes() else 1) or queries != keys:
                continue
            looked += 1
            future = batch * heads * keys * (keys - 1) // 2
            zeros = sum(row.zeros for row in rows)
            if zeros < future:
                text = f"{future - zeros} of {future} probabilities of later tokens are not zero in {rows[0].name}"
                found.append((rows[0], text))
        found += _other_masks(step)
    if not looked:
        raise NotChecked("the softmax as a module of its own (not a fused attention): dump: {level: L0}")
    if _encoder(scene):
        raise NotChecked("a model that is causal throughout")
    if not found:
        return []
    row, text = found[0]
    return [Breach(f"{text} ({moment(row)}, rank {row.rank}); {len(found)} in all", at(row))]


def _encoder(scene: Scene) -> bool:
    classes = {str(c.get("class")) for facts in scene.run.ranks.values() for c in facts.get("chunks", [])}
    return bool(classes - {"GPTModel", "MambaModel"})


def _other_masks(step: Step) -> list[tuple[Row, str]]:
    """Layers whose mask is not that of most layers of the same rank and microbatch."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in _softmax(step, "input"):
        if row.path == "mask":
            groups[row.rank, row.microbatch, row.shape].append(row)
    found = []
    for rows in groups.values():
        kinds: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
        for row in rows:
            kinds[row.sum, row.zeros, row.digest].append(row)
        most = max(kinds.values(), key=len)
        few = [row for group in kinds.values() if group is not most for row in group]
        if few and 2 * len(most) > len(rows):
            found.append((few[0], f"the mask of {few[0].name} is not that of the other layers"))
    return found


def rotary_table(scene: Scene) -> list[Breach]:
    """The table of rotary angles is position times frequency, for the positions of this rank."""
    base = scene.argument("rotary_base")
    scaled = scene.argument("use_rope_scaling") or scene.argument("rotary_seq_len_interpolation_factor")
    if base is None or scaled or scene.argument("position_embedding_type") != "rope":
        raise NotChecked("plain rotary embeddings, and the training arguments")
    found, looked = [], 0
    for step in scene.steps:
        for row in step.of("activation"):
            if row.op != "RotaryEmbedding" or row.io != "output" or row.phase != "forward" or len(row.shape) != 4:
                continue
            table = _angles(scene, row, float(base))
            looked += 1
            total, squares, top = float(table.sum()), float((table**2).sum()), float(table.max())
            near = abs(row.sum - total) <= 1e-4 * total and abs(row.sumsq - squares) <= 1e-4 * squares
            if not near or abs(row.max - top) > 1e-4 * max(top, 1.0):
                found.append((row, row.sum, total))
    if not looked:
        raise NotChecked("the rotary embedding as a module: dump: {level: L0}")
    if not found:
        return []
    row, value, wanted = found[0]
    text = f"the rotary angles sum to {value:.7g}, position times frequency to {wanted:.7g} ({moment(row)})"
    ranks = sorted({r.rank for r, _, _ in found})
    return [Breach(f"{text}; ranks {ranks}", at(row, ranks=ranks, value=value, expected=wanted))]


def _angles(scene: Scene, row: Row, base: float) -> np.ndarray[Any, Any]:
    length, width = row.shape[0], row.shape[-1]
    places = np.arange(length, dtype=np.float64)
    if "cp" in spec_of(row.shard).cut_axes() and scene.size("cp") > 1:
        count, rank = scene.size("cp"), scene.at(row.rank, "cp")
        pieces = np.arange(length * count, dtype=np.float64).reshape(2 * count, -1)
        places = np.concatenate([pieces[rank], pieces[2 * count - 1 - rank]])
    frequencies = 1.0 / base ** (np.arange(0, width, 2, dtype=np.float64) / width)
    half = np.outer(places, frequencies)
    return np.concatenate([half, half], axis=1)


def attention_scale(scene: Scene) -> list[Breach]:
    """Scores before the softmax lie within what the norms of queries and keys, and the scale, allow."""
    found, looked = [], 0
    for step in scene.steps:
        inputs: dict[tuple[Any, ...], dict[str, Row]] = defaultdict(dict)
        for row in step.of("activation"):
            taken = row.op == "DotProductAttention" and row.io == "input" and row.path in ("query", "key")
            if taken and row.phase == "forward" and len(row.shape) == 4:
                inputs[row.rank, row.microbatch, row.name][row.path] = row
        for row in _softmax(step, "input"):
            pair = inputs.get((row.rank, row.microbatch, row.name.rpartition(".")[0]), {})
            if row.path != "input" or len(pair) != 2 or scene.argument("apply_query_key_layer_scaling"):
                continue
            query, key = pair["query"], pair["key"]
            looked += 1
            # |q.k| <= |q| |k|, each at most its largest magnitude times the root of the width.
            bound = query.absmax * key.absmax * query.shape[-1] / math.sqrt(query.shape[-1])
            if row.absmax > bound * (1 + 8 * row.epsilon):
                found.append((row, row.absmax, bound))
    if not looked:
        raise NotChecked("queries, keys and scores: dump: {level: L0}, and an attention that is not fused")
    if not found:
        return []
    row, value, bound = found[0]
    text = f"a score of {value:.4g} in {row.name} is more than queries and keys allow ({bound:.4g}; {moment(row)})"
    return [Breach(f"{text}; {len(found)} in all", at(row, value=value, expected=bound))]


LAWS = (
    Law(
        "attention-sums-to-one",
        "the probabilities of a query sum to one",
        "a softmax over the wrong dimension or over a part, probabilities scaled twice",
        "dump: {level: L0}, and an attention that is not fused",
        "nothing beyond the dump",
        probabilities,
        "record the calls of the module that is named: dump: {level: mix, list: [core_attention]}",
    ),
    Law(
        "no-future-token",
        "no token sees a later one, and all layers have the same mask",
        "a mask that is left out, off by one or inverted, in one layer or in all",
        "dump: {level: L0}, and an attention that is not fused",
        "nothing beyond the dump",
        no_future,
        "look at the mask and the mask type that the module is given",
    ),
    Law(
        "attention-bound",
        "scores lie within what queries, keys and the scale allow",
        "scores that are not scaled",
        "dump: {level: L0}, and an attention that is not fused",
        "nothing beyond the dump",
        attention_scale,
        "look at the softmax scale of the module that is named",
    ),
    Law(
        "rotary-table",
        "rotary angles are position times frequency",
        "another base or width, positions without the offset of the context-parallel rank",
        "dump: {level: L0}, rotary embeddings, and the training arguments",
        "nothing beyond the dump",
        rotary_table,
        "look at rotary_base, rotary_percent and how the table is cut over context-parallel ranks",
    ),
)
