"""A run of another implementation, written anew in Megatron's names and forms, so that `compare` can read it.

Every rule of the map whose sources were recorded becomes a row: of whole tensors if they were saved, otherwise of
statistics, which add up over the parts of a fused tensor and do not mind the order of elements. What the map does not
name is left out; what of the map was not recorded is listed in `run.json`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_megatron.analysis.align.choices import choice_words
from msprobe_megatron.analysis.align.forms import FORMS, Sizes, dense_choice, sequence_first
from msprobe_megatron.analysis.align.name_map import NameMap, Rule, place
from msprobe_megatron.analysis.align.tensors import Key, StepTensors, Whole, numbers
from msprobe_megatron.analysis.load.run import Run, RunError, open_run
from msprobe_megatron.run_directory.directory import RunDirectory, put
from msprobe_megatron.run_directory.schema import Row
from msprobe_megatron.run_directory.table import build_table

_AXES = ("tp", "pp", "dp", "cp", "ep", "etp")
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}
_LETTERS = "snhdk"
_ITEM = re.compile(r"^(.*)\[(\d+)\]$")
_ADDED = ("sum", "sumsq", "n_nan", "n_posinf", "n_neginf", "n_zero", "numel")
# Tensors of Megatron that begin with the batch: ids and logits of the model, and the embedding without dropout.
_BATCH_FIRST = ("model input input_ids", "model output", "embedding.word_embeddings output")


@dataclass
class _Rows:
    """Rows of a step in the making, and the bytes of their tensors."""

    rows: list[Row]
    floats: list[list[float]]
    counts: list[list[int]]
    index: dict[str, dict[str, Any]]
    data: bytearray
    other: StepTensors | None = None
    """The same step of Megatron's run."""


def sizes_of(settings: Mapping[str, Any]) -> Sizes:
    """Sizes that forms need, from a configuration of Hugging Face or of Megatron."""

    def number(*names: str, otherwise: int) -> int:
        return next((int(settings[n]) for n in names if isinstance(settings.get(n), int) and settings[n]), otherwise)

    heads = number("num_attention_heads", "n_head", otherwise=1)
    return Sizes(
        heads,
        number("num_key_value_heads", "num_query_groups", otherwise=heads),
        number("num_local_experts", "num_experts", "n_routed_experts", "num_moe_experts", otherwise=0),
    )


# Where TransformerEngine keeps a norm inside the linear layer that follows it.
_FUSED = (
    ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    ("input_layernorm.bias", "self_attention.linear_qkv.layer_norm_bias"),
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ("pre_mlp_layernorm.bias", "mlp.linear_fc1.layer_norm_bias"),
)


def translated(
    run: Run,
    names: NameMap,
    out: Path,
    steps: Mapping[int, int],
    other: Run | None = None,
    pairs: Mapping[int, int] | None = None,
) -> Run:
    """Write the steps of `run` into `out` in Megatron's form; `steps` gives the number that each step gets there.

    `other` is the run of Megatron to be compared with, whose names of fused norms and padding of the vocabulary are
    taken over; `pairs` says which of its steps belongs to each of the golden run.
    """
    settings = run.facts.get("effective", {}).get("model", {})
    sizes = sizes_of(settings)
    directory = RunDirectory.create(out)
    directory.claim_rank(0)
    missing: set[str] = set()
    for theirs, ours in sorted(steps.items()):
        tensors = StepTensors.of(run, theirs)
        ids = tensors.rows.get(("activation", "model", "input", "input_ids"))
        sizes = replace(sizes, samples=int(ids[0]["shape"][0]) if ids and len(ids[0]["shape"]) == 2 else 1)
        made = _Rows([], [], [], {}, bytearray(), _other_step(other, theirs, pairs or {}))
        for target, rules, layer, expert in _targets(names, tensors, sizes):
            if not _add(made, tensors, target, rules, sizes, layer, expert):
                missing.add(target)
        if not made.rows:
            raise RunError(f"{run.path}: none of its tensors is in the map {names.name}; accepted: --map with another")
        _write(directory, ours, made)
    facts = {
        "format": 1,
        "aligned_from": str(run.path),
        "map": names.name,
        "not_recorded": sorted(missing)[:50],
        "world": 1,
        "sizes": dict.fromkeys((*_AXES, "vpp", "edp"), 1),
        "gradient_scale": 1.0,
        "ranks": [{"rank": 0, **dict.fromkeys((*_AXES, "edp"), 0)}],
        "ranks_complete": True,
        "versions": run.facts.get("versions", {}),
        "arguments": {"num_layers": _layers(settings)},
        "effective": run.facts.get("effective", {}),
        "probe": {"content": {}},
    }
    directory.write_json("run.json", facts)
    chunks = [{"vpp": 0, "layers": list(range(_layers(settings))), "first": True, "last": True}]
    directory.write_json("ranks/rank_00000.json", {"closed": True, "chunks": chunks, "ledger": {"steps": [*steps]}})
    directory.close()
    return open_run(out)


def _other_step(other: Run | None, step: int, pairs: Mapping[int, int]) -> StepTensors | None:
    if other is None:
        return None
    both = {**pairs, **{right: left for left, right in pairs.items()}}
    number = both.get(step, step)
    return StepTensors.of(other, number) if number in other.steps else None


def _as_named_by(other: StepTensors | None, name: str) -> str:
    """The name of a weight in Megatron's run, where norms may be fused with the layer behind them."""
    if other is not None and ("parameter", name, "weight", "") not in other:
        for plain, fused in _FUSED:
            changed = name.removesuffix(plain) + fused
            if name.endswith(plain) and ("parameter", changed, "weight", "") in other:
                return changed
    return name


def _with_padding(result: Whole, other: StepTensors | None, key: Key) -> Whole:
    """The result with Megatron's own padding of the vocabulary behind it, which is then compared with itself."""
    theirs = other.whole(key) if other is not None and key in other else None
    if theirs is None or theirs.dtype != result.dtype or theirs.words.ndim != result.words.ndim:
        return result
    axis = 0 if key[0] == "parameter" else -1
    there, here = theirs.words.shape, result.words.shape
    if there[axis] <= here[axis] or [*there][:axis] + [*there][axis:][1:] != [*here][:axis] + [*here][axis:][1:]:
        return result
    rest = np.take(theirs.words, np.arange(here[axis], there[axis]), axis)
    return result._replace(words=np.concatenate((result.words, rest), axis))


def _layers(settings: Mapping[str, Any]) -> int:
    return next((int(settings[n]) for n in ("num_hidden_layers", "n_layer", "num_layers") if settings.get(n)), 0)


def _targets(
    names: NameMap, tensors: StepTensors, sizes: Sizes
) -> Iterator[tuple[str, tuple[Rule, ...], int | None, int | None]]:
    """Every tensor of Megatron that the map names, layer by layer and expert by expert."""
    layer_names = re.compile(rf"{re.escape(names.their_layers)}\.(\d+)\b")
    layers = sorted({int(m[1]) for _, name, _, _ in tensors.rows if (m := layer_names.match(name))})
    for target, rules in (*names.weights.items(), *names.tensors.items()):
        for layer in layers if "{l}" in target else [None]:
            for expert in range(sizes.experts) if "{e}" in target else [None]:
                yield target, rules, layer, expert


def _filled(text: str, layer: int | None, expert: int | None) -> str:
    return text.replace("{l}", str(layer)).replace("{e}", str(expert))


def _add(
    made: _Rows,
    tensors: StepTensors,
    target: str,
    rules: Sequence[Rule],
    sizes: Sizes,
    layer: int | None,
    expert: int | None,
) -> bool:
    """Add the row of a target by the first rule whose sources were recorded; False if there is none."""
    weight = " " not in target
    for rule in rules:
        sources = [_filled(source, layer, expert) for source in rule.sources]
        keys = [_weight_key(text, tensors) if weight else ("activation", *place(text)) for text in sources]
        if any(key is None or key[:4] not in tensors for key in keys):
            continue
        name, io, path = (
            (_filled(target, layer, expert), "weight", "") if weight else place(_filled(target, layer, expert))
        )
        wholes = [_part(tensors, key) for key in keys if key is not None]
        if weight:
            name = _as_named_by(made.other, name)
        key = ("parameter" if weight else "routing" if rule.form == "routing" else "activation", name, io, path)
        if rule.form == "routing":
            return _add_choices(made, tensors, key, wholes, sizes)
        if all(whole is not None for whole in wholes):
            result = formed(rule.form, [w for w in wholes if w is not None], sizes, weight, target)
            if "word_embeddings" in name or "output_layer" in name or name == "model" and io == "output":
                result = _with_padding(result, made.other, key)
            _add_tensor(made, key, result)
        elif rule.form != "dense" and not any(len(key) > 4 for key in keys if key is not None):
            _add_statistics(made, key, [tensors.first(key[:4]) for key in keys if key is not None], rule.form, target)
        else:
            return False
        return True
    return False


def _add_choices(made: _Rows, tensors: StepTensors, key: Key, wholes: Sequence[Whole | None], sizes: Sizes) -> bool:
    """The choices of a router; its bias, where it has one, is a buffer beside its weight."""
    logits, chosen = wholes
    if logits is None or chosen is None:
        return False
    settings = tensors.run.facts.get("effective", {}).get("model", {})
    gate = key[1].replace("decoder.layers", "model.layers").replace("mlp.router", "mlp.gate")
    bias = tensors.whole(("parameter", f"{gate}.e_score_correction_bias", "weight", ""))
    values = logits.values().astype(np.float32)
    words = choice_words(values, chosen.words, None if bias is None else bias.values().astype(np.float32), settings)
    words = sequence_first(words.reshape(sizes.samples, -1, words.shape[-1]))
    name = _store(made, "I32", words)
    made.rows.append(_row(made, key, "int32", words.shape, logits.seq, "s b c", name)._replace(slot=-1))
    return True


def _weight_key(text: str, tensors: StepTensors) -> Any:
    """Key of a weight; one with [e] is an entry of a stacked weight."""
    match = _ITEM.match(text)
    return ("parameter", match[1], "weight", "", int(match[2])) if match else ("parameter", text, "weight", "")


def _part(tensors: StepTensors, key: Any) -> Whole | None:
    found = tensors.whole(key[:4])
    if found is None or len(key) == 4:
        return found
    return found._replace(words=found.words[key[4]]) if key[4] < len(found.words) else None


def formed(form: str, parts: Sequence[Whole], sizes: Sizes, weight: bool, target: str) -> Whole:
    """The tensor of Megatron that these sources make."""
    seq, dtype = max(part.seq for part in parts), parts[0].dtype
    if form == "plus_one":
        return Whole("F32", (parts[0].values() + 1).astype("<f4"), seq)
    if form == "dense":
        return Whole(dtype, dense_choice(parts[0].words, parts[1].words, sizes), seq)
    words = FORMS[form]([part.words for part in parts], sizes, 0 if weight else -1)
    if not weight and target not in _BATCH_FIRST:
        words = sequence_first(words)
    return Whole(dtype, np.ascontiguousarray(words), seq)


def _shard(weight: bool, target: str, ndim: int) -> str:
    if weight:
        return " ".join(f"d{i}" for i in range(ndim))
    if "router output" in target or "router input" in target and ndim == 2:
        return "s*b e"
    letters = (
        ["b", "s"] if target in _BATCH_FIRST or "model input" in target or target == "model output" else ["s", "b"]
    )
    return " ".join([*letters, *_LETTERS[1:]][:ndim])


def _row(made: _Rows, key: Key, dtype: str, shape: tuple[int, ...], seq: int, shard: str, tensor: str | None) -> Row:
    kind, name, io, path = key
    weight = kind == "parameter"
    return Row(
        seq=seq,
        microbatch=None if weight else 0,
        phase="optimizer" if weight else "forward",
        vpp=0,
        kind=kind,
        name=name,
        io=io,
        path=path,
        op="",
        site=-1,
        dtype=dtype,
        shape=shape,
        global_shape=shape,
        shard=shard,
        numel=math.prod(shape),
        slot=len(made.floats),
        tensor=tensor,
    )


def _add_tensor(made: _Rows, key: Key, result: Whole) -> None:
    target = " ".join(part for part in key[1:] if part)
    shape = tuple(int(n) for n in result.words.shape)
    name = _store(made, result.dtype, result.words)
    shard = _shard(key[0] == "parameter", target, len(shape))
    made.rows.append(_row(made, key, _NAMES.get(result.dtype, "float32"), shape, result.seq, shard, name))
    floats, counts = statistics(result.dtype, result.words)
    made.floats.append(floats)
    made.counts.append(counts)


def _store(made: _Rows, dtype: str, words: npt.NDArray[Any]) -> str:
    """Add the bytes of a tensor to the pack; returns its key."""
    name, content = f"0:{len(made.index)}", words.tobytes()
    offsets = [len(made.data), len(made.data) + len(content)]
    made.index[name] = {"dtype": dtype, "shape": list(words.shape), "data_offsets": offsets}
    made.data += content
    return name


def statistics(dtype: str, words: npt.NDArray[Any]) -> tuple[list[float], list[int]]:
    """Minimum, maximum, sum, sum of squares and largest magnitude of the finite elements, and counts of the others."""
    values = numbers(dtype, words).reshape(-1)
    finite = values[np.isfinite(values)]
    counts = [int(np.isnan(values).sum()), int((values == np.inf).sum()), int((values == -np.inf).sum())]
    if not finite.size:
        return [math.nan] * 5, [*counts, 0]
    low, high = float(finite.min()), float(finite.max())
    floats = [low, high, float(finite.sum()), float((finite * finite).sum()), max(abs(low), abs(high))]
    return floats, [*counts, int((finite == 0).sum())]


def _add_statistics(made: _Rows, key: Key, rows: Sequence[dict[str, Any]], form: str, target: str) -> None:
    """A row from the statistics of its parts, where the tensors themselves were not saved."""
    if form == "plus_one":
        return
    weight, first = key[0] == "parameter", rows[0]
    shape = list(first["shape"])
    axis = 0 if weight else -1
    shape[axis] = sum(row["shape"][axis] for row in rows)
    if not weight and target not in _BATCH_FIRST and len(shape) >= 2:
        shape[0], shape[1] = shape[1], shape[0]
    if form.startswith("transposed"):
        shape.reverse()
    total = {name: sum(row[name] or 0 for row in rows) for name in _ADDED}
    low, high = min(_number(row["min"]) for row in rows), max(_number(row["max"]) for row in rows)
    shard = _shard(weight, " ".join(part for part in key[1:] if part), len(shape))
    row = _row(made, key, first["dtype"], tuple(shape), max(row["seq"] for row in rows), shard, None)
    if form == "same" and weight and len(rows) == 1:
        # The same elements in the same order: the digest is that of Megatron's tensor too.
        sketch = first["sketch"]
        row = row._replace(digest=first["digest"], sketch=None if sketch is None else tuple(sketch))
    made.rows.append(row)
    made.floats.append([low, high, float(total["sum"]), float(total["sumsq"]), max(_number(r["absmax"]) for r in rows)])
    made.counts.append([int(total[name]) for name in ("n_nan", "n_posinf", "n_neginf", "n_zero")])


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _write(directory: RunDirectory, step: int, made: _Rows) -> None:
    folder = f"step_{step:06d}/rank_00000"
    index = json.dumps(made.index).encode("ascii")
    index += b" " * (-len(index) % 64)

    def fill(file: Any) -> None:
        for content in (len(index).to_bytes(8, "little"), index, made.data):
            put(file, content)

    if made.index:
        directory.write_file(f"{folder}/tensors.safetensors", fill)
    directory.write_json(f"{folder}/sites.json", {"modules": [], "apis": []})
    floats, counts = np.array(made.floats, np.float64), np.array(made.counts, np.int64)
    table = build_table(step, made.rows, floats, counts, {"rank": 0, **dict.fromkeys(_AXES, 0)})
    directory.write_table(f"{folder}/records.parquet", table)
