"""Laws of what lies between modules: tensors go on unchanged, rotations keep norms, averages stay within bounds."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from msprobe_megatron.analysis.laws.law import Breach, Law, NotChecked, at, label, moment
from msprobe_megatron.analysis.laws.scene import Row, Scene, Step

# From the output of one module to the input of the next, by the ends of their names.
_WIRES = (
    (("input_layernorm", ""), ("self_attention", "hidden_states")),
    (("pre_mlp_layernorm", ""), ("mlp", "hidden_states")),
    (("self_attention.core_attention", ""), ("self_attention.linear_proj", "input_")),
)
_ENDS = ((("embedding", ""), ("decoder", "hidden_states")), (("decoder", ""), ("output_layer", "input_")))
_Key = tuple[Any, ...]


def forward_rows(step: Step) -> dict[_Key, Row]:
    """Forward rows by rank, microbatch, chunk, name, side and path; the first where a module ran more than once."""
    found: dict[_Key, Row] = {}
    for row in step.of("activation"):
        if row.phase == "forward" and row.microbatch is not None:
            found.setdefault((row.rank, row.microbatch, row.vpp, row.name, row.io, row.path), row)
    return found


def wired(scene: Scene) -> list[Breach]:
    """What a module of a plain layer puts out is what the next one takes in."""
    found, looked = [], 0
    for step in scene.steps:
        rows = forward_rows(step)
        for (rank, microbatch, vpp, name, io, path), row in rows.items():
            if io != "output":
                continue
            for (source, of), (target, into) in (*_WIRES, *_ENDS):
                whole = name == source if "layer" not in source and "." not in source else name.endswith(f".{source}")
                if not whole or path != of:
                    continue
                other = name[: len(name) - len(source)] + target
                taken = rows.get((rank, microbatch, vpp, other, "input", into))
                if taken is None or taken.dtype != row.dtype or taken.numel != row.numel:
                    continue
                looked += 1
                if not scene.same(row, taken):
                    found.append((taken, row))
    if not looked:
        raise NotChecked("modules of plain layers: dump: {level: L0}")
    if not found:
        return []
    taken, row = min(found, key=lambda pair: (pair[0].step, pair[0].microbatch or 0, pair[0].seq))
    text = (
        f"{label(taken)} is not what {label(row)} was: norm {taken.norm:.9g} for {row.norm:.9g} ({moment(taken)},"
        f" rank {taken.rank}); {len(found)} tensors in all"
    )
    return [Breach(text, at(taken, tensors=len(found)))]


def rotated(scene: Scene) -> list[Breach]:
    """Queries, keys and values hold the squares that the projection put out: a rotation keeps norms."""
    if scene.argument("qk_layernorm") or scene.argument("multi_latent_attention"):
        raise NotChecked("attention without norms of queries and keys")
    found, looked = [], 0
    for step in scene.steps:
        rows = forward_rows(step)
        for (rank, microbatch, vpp, name, io, path), row in rows.items():
            if not name.endswith(".self_attention.linear_qkv") or (io, path) != ("output", "0"):
                continue
            base = name.removesuffix("linear_qkv") + "core_attention"
            parts = [rows.get((rank, microbatch, vpp, base, "input", part)) for part in ("query", "key", "value")]
            known = [part for part in parts if part is not None]
            if len(known) != 3 or sum(part.numel for part in known) != row.numel:
                continue
            looked += 1
            total = sum(part.sumsq for part in known)
            # Roundings of single elements, half of them up: their mean is far below one of them.
            room = 1e-5 if row.dtype == "float32" else max(part.epsilon for part in known)
            if abs(total - row.sumsq) > room * row.sumsq:
                found.append((row, total))
    if not looked:
        raise NotChecked("the projection, queries, keys and values: dump: {level: L0}")
    if not found:
        return []
    row, total = found[0]
    text = (
        f"queries, keys and values of {row.name.rpartition('.')[0]} hold squares that sum to {total:.7g}, the"
        f" projection put out {row.sumsq:.7g} ({moment(row)}, rank {row.rank}); {len(found)} in all"
    )
    return [Breach(text, at(row, value=total, expected=row.sumsq, tensors=len(found)))]


def averaged(scene: Scene) -> list[Breach]:
    """Attention puts out averages of values: no element beyond the largest value."""
    if scene.argument("attention_dropout") != 0:
        raise NotChecked("a model without attention dropout, and the training arguments")
    found, looked = [], 0
    for step in scene.steps:
        rows = forward_rows(step)
        highest: dict[_Key, float] = defaultdict(float)
        for (rank, microbatch, vpp, name, io, path), row in rows.items():
            if (io, path) == ("input", "value") and name.endswith("core_attention"):
                # Context-parallel ranks see each other's values.
                place = tuple(scene.at(rank, axis) for axis in ("tp", "pp", "dp"))
                highest[(microbatch, vpp, name, place)] = max(highest[(microbatch, vpp, name, place)], row.absmax)
        for (rank, microbatch, vpp, name, io, path), row in rows.items():
            if (io, path) != ("output", "") or not name.endswith("core_attention"):
                continue
            place = tuple(scene.at(rank, axis) for axis in ("tp", "pp", "dp"))
            most = highest.get((microbatch, vpp, name, place))
            if most is None:
                continue
            looked += 1
            if row.absmax > most * (1 + 4 * row.epsilon + 1e-5):
                found.append((row, most))
    if not looked:
        raise NotChecked("values and outputs of attention: dump: {level: L0}")
    if not found:
        return []
    row, most = found[0]
    text = (
        f"{row.name} puts out {row.absmax:.5g}, more than any value it averages ({most:.5g}; {moment(row)}, rank"
        f" {row.rank}); {len(found)} in all"
    )
    return [Breach(text, at(row, value=row.absmax, expected=most, tensors=len(found)))]


def embedded(scene: Scene) -> list[Breach]:
    """Embeddings of words and positions sum to what goes into the model, and hold no larger number than their table."""
    found: list[tuple[Row, str]] = []
    looked = 0
    for step in scene.steps:
        table = step.of("parameter", "embedding.word_embeddings.weight", path="")
        most = max((row.absmax for row in table), default=None)
        whole = len(scene.parts(table)) == scene.size("tp")
        for row in step.of("activation", "embedding.word_embeddings", "output", ""):
            if most is not None and whole and row.phase == "forward":
                looked += 1
                if row.absmax > most * (1 + 1e-6):
                    text = f"embeddings hold {row.absmax:.5g}, their table no more than {most:.5g}"
                    found.append((row, text))
        found += _summed(scene, step)
    if not looked:
        raise NotChecked("the embedding and its weight: dump: {level: L0}")
    if not found:
        return []
    row, text = found[0]
    return [Breach(f"{text} ({moment(row)}); {len(found)} in all", at(row, tensors=len(found)))]


def _summed(scene: Scene, step: Step) -> list[tuple[Row, str]]:
    found = []
    parts: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    norms: dict[int, float] = defaultdict(float)
    first: dict[int, Row] = {}
    for name, io in (("word_embeddings", "output"), ("position_embeddings", "output"), ("embedding_dropout", "input")):
        rows = [r for r in step.of("activation", f"embedding.{name}", io) if r.phase == "forward" and r.epsilon]
        for row in scene.parts(row for row in rows if row.microbatch is not None):
            number = row.microbatch or 0
            parts[number][name] += row.sum
            norms[number] += row.epsilon * (24 * row.norm + 0.02 * row.spread)
            first.setdefault(number, row)
    for number, sums in parts.items():
        if "embedding_dropout" in sums and "word_embeddings" in sums and not _more_embeddings(step):
            wanted = sums["word_embeddings"] + sums["position_embeddings"]
            if abs(sums["embedding_dropout"] - wanted) > norms[number] + 1e-12:
                text = f"embeddings of words and positions sum to {wanted:.6g}, {sums['embedding_dropout']:.6g} goes on"
                found.append((first[number], text))
    return found


def _more_embeddings(step: Step) -> bool:
    return bool(step.of("activation", "embedding.tokentype_embeddings"))


LAWS = (
    Law(
        "embedding",
        "embeddings of words and positions sum to what goes into the model, and stay within their table",
        "a shard of the vocabulary that is not masked, positions left out or added twice",
        "dump: {level: L0}",
        "nothing beyond the dump",
        embedded,
        "look at the embedding and its reduction over tensor-parallel ranks",
    ),
    Law(
        "wiring",
        "what a module of a plain layer puts out is what the next one takes in",
        "a tensor that is changed, scaled or replaced between two modules",
        "dump: {level: L0}",
        "nothing beyond the dump",
        wired,
        "look at what lies between the two modules: dump: {level: mix}",
    ),
    Law(
        "rotation-keeps-norms",
        "queries, keys and values hold the squares that the projection put out",
        "a rotary embedding that is no rotation, queries scaled twice, a wrong split of the projection",
        "dump: {level: L0}",
        "nothing beyond the dump",
        rotated,
        "look at the rotary embedding and at how the projection is split",
    ),
    Law(
        "attention-averages",
        "attention puts out averages of values, fused or not",
        "probabilities that sum to more than one, a wrong correction between chunks",
        "dump: {level: L0}",
        "nothing beyond the dump",
        averaged,
        "look at the attention that is named: normalisation, context-parallel correction",
    ),
)
