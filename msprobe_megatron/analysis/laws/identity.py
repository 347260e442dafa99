"""Laws of identity: tensors that are the same thing hold the same bits, and different things do not.

A forward that is computed again, a tensor that goes from one stage to the next, weights that ranks share; and on the
other side shards, layers and samples, which are never bit-identical in a healthy run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from msprobe_megatron.analysis.laws.law import Breach, Law, NotChecked, at, label, moment
from msprobe_megatron.analysis.laws.scene import Row, Scene, Step, spec_of
from msprobe_megatron.topology.layers import layer_of

_SHARED = ("parameter", "grad_reduced", "optimizer_state")
_SMALLEST = 16
"""Elements that a tensor has at least for two equal ones to be more than chance."""


def recomputed(scene: Scene) -> list[Breach]:
    """The repeated forward of a checkpointed region gives the bits of the first one."""
    found, looked = [], 0
    for step in scene.steps:
        first: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
        again: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
        for row in step.of("activation"):
            side = again if row.phase == "recompute" else first if row.phase == "forward" else None
            if side is not None:
                key = (row.rank, row.microbatch, row.vpp, *row.place)
                side[key].append(row)
        for key, rows in again.items():
            if len(first.get(key, ())) != len(rows):
                continue
            for before, after in zip(first[key], rows, strict=True):
                looked += 1
                if not scene.same(before, after):
                    found.append((after, before))
    if not looked:
        raise NotChecked("a job that recomputes activations, recorded with dump: {level: L0}")
    if not found:
        return []
    after, before = min(found, key=lambda pair: (pair[0].step, pair[0].microbatch or 0, pair[0].seq))
    text = (
        f"the recomputed {label(after)} differs from the first forward: norm {after.norm:.9g} for {before.norm:.9g}"
        f" ({moment(after)}, rank {after.rank}); {len(found)} tensors in all"
    )
    return [Breach(text, at(after, tensors=len(found)))]


def handed_on(scene: Scene) -> list[Breach]:
    """What a layer puts out is what the next layer takes in, across pipeline stages too; gradients on the way back."""
    found, looked = [], 0
    for step in scene.steps:
        for kind in ("activation", "gradient"):
            given = _layer_ends(step, kind, "output")
            taken = _layer_ends(step, kind, "input")
            for (layer, microbatch), rows in sorted(taken.items(), key=lambda item: (item[0][1], item[0][0])):
                for row in rows:
                    sent = [
                        other
                        for other in given.get((layer - 1, microbatch), [])
                        if _beside(scene, other, row) and other.shard == row.shard
                    ]
                    if not sent:
                        continue
                    looked += 1
                    if not any(scene.same(other, row) for other in sent):
                        found.append((row, sent[0]))
    if not looked:
        raise NotChecked("the inputs and outputs of all layers: dump: {level: L0}")
    if not found:
        return []
    row, other = found[0]
    if row.kind == "activation":
        text = f"layer {layer_of(row.name)} does not take in what layer {layer_of(other.name)} put out"
    else:
        text = f"layer {layer_of(other.name)} does not get back the gradient that layer {layer_of(row.name)} sent"
    who = f"rank {other.rank} to rank {row.rank}" if other.rank != row.rank else f"rank {row.rank}"
    text += f": norm {row.norm:.9g} for {other.norm:.9g} ({moment(row)}, {who}); {len(found)} tensors in all"
    return [Breach(text, at(row, ranks=sorted({other.rank, row.rank}), tensors=len(found)))]


def _layer_ends(step: Step, kind: str, io: str) -> dict[tuple[int, int], list[Row]]:
    """Hidden states that enter or leave whole layers of the decoder, by layer and microbatch."""
    found: dict[tuple[int, int], list[Row]] = defaultdict(list)
    phase = "forward" if kind == "activation" else "backward"
    wanted = ("hidden_states",) if io == "input" else ("", "0")
    for row in step.of(kind):
        head, _, number = row.name.rpartition(".")
        if not number.isdigit() or head != "decoder.layers" or row.op != "TransformerLayer":
            continue
        if row.io == io and row.path in wanted and row.phase == phase and row.microbatch is not None:
            found[int(number), row.microbatch].append(row)
    return found


def _beside(scene: Scene, left: Row, right: Row) -> bool:
    return all(scene.at(left.rank, axis) == scene.at(right.rank, axis) for axis in ("tp", "cp", "dp"))


def shared_weights(scene: Scene) -> list[Breach]:
    """Ranks that share a weight hold the same bits of it, of its reduced gradient and of its optimizer state."""
    odd, looked = [], 0
    for step in scene.steps:
        for kind in _SHARED:
            groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
            for row in step.of(kind):
                if spec_of(row.shard).unknown is None:
                    key = (*row.place, row.shape, row.shard, scene.coordinates(row))
                    groups[key].append(row)
            for rows in groups.values():
                looked += len(rows) > 1
                odd += _odd(scene, rows)
    if not looked:
        raise NotChecked("weights that several ranks share, recorded with dump or monitor: {parameters: true}")
    return _told_replicas(odd, "certain")


def shared_activations(scene: Scene) -> list[Breach]:
    """Ranks of a tensor-parallel group that hold a whole activation hold the same bits of it."""
    if scene.size("tp") == 1:
        raise NotChecked("a job with tensor parallelism")
    odd, looked = [], 0
    for step in scene.steps:
        groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
        for row in step.of("activation"):
            spec = spec_of(row.shard)
            if row.phase != "forward" or spec.unknown is not None or "unordered" in row.shard or row.microbatch is None:
                continue
            if "tp" in spec.cut_axes() or "etp" in spec.cut_axes() or "experts" in row.name:
                continue
            others = tuple(scene.at(row.rank, axis) for axis in ("pp", "dp", "cp", "ep"))
            key = (*row.place, row.microbatch, row.vpp, row.shape, row.shard, others)
            groups[key].append(row)
        for rows in groups.values():
            by_rank = {row.rank for row in rows}
            if len(by_rank) == len(rows):
                looked += len(rows) > 1
                odd += _odd(scene, rows)
    if not looked:
        raise NotChecked("activations of all tensor-parallel ranks: dump: {level: L0}")
    return _told_replicas(odd, "likely")


def _odd(scene: Scene, rows: list[Row]) -> list[tuple[Row, list[int]]]:
    """Nothing where all are the same, else the first that differs and the ranks that do (all where two disagree)."""
    first = rows[0]
    other = [row for row in rows[1:] if not scene.same(first, row)]
    if not other:
        return []
    if len(rows) == 2 or 2 * len(other) == len(rows):
        return [(other[0], sorted(row.rank for row in rows))]
    few = other if 2 * len(other) < len(rows) else [first]
    return [(few[0], sorted(row.rank for row in few))]


def _told_replicas(odd: list[tuple[Row, list[int]]], sure: str) -> list[Breach]:
    if not odd:
        return []
    row, ranks = min(odd, key=lambda pair: (pair[0].step, pair[0].kind != "parameter", pair[0].microbatch or 0))
    text = f"ranks {ranks} should hold the same bits of {label(row)} and do not ({moment(row)}); {len(odd)} in all"
    return [Breach(text, at(row, ranks=ranks, tensors=len(odd)), sure)]


def distinct_weights(scene: Scene) -> list[Breach]:
    """Shards of one weight, and weights of different layers, are not copies of each other."""
    copies: list[tuple[Row, Row]] = []
    looked = 0
    for step in scene.steps[:1]:
        seen: dict[tuple[Any, ...], Row] = {}
        rows = [row for row in step.of("parameter") if row.path == "" and _random(row)]
        once = {(row.name, row.shard, scene.coordinates(row)): row for row in reversed(rows)}
        for row in reversed(once.values()):
            looked += 1
            key = (row.shape, row.dtype, row.min, row.max, row.sumsq, row.sum)
            other = seen.setdefault(key, row)
            if other is not row and not (other.name == row.name and scene.coordinates(other) == scene.coordinates(row)):
                copies.append((other, row))
    if not looked:
        raise NotChecked("weights: dump, or monitor: {parameters: true}")
    copies = [pair for pair in copies if not _upcycled(*pair, copies)]
    if not copies:
        return []
    first, second = copies[0]
    if first.name == second.name:
        text = f"ranks {first.rank} and {second.rank} hold the same bits as different shards of {first.name}"
    else:
        text = f"{second.name} is bit for bit {first.name} (ranks {second.rank} and {first.rank})"
    text += f" (step {second.step}); {len(copies)} pairs in all. One seed for all, or one part loaded twice?"
    return [Breach(text, at(second, ranks=sorted({first.rank, second.rank}), tensors=len(copies)), "likely")]


def _random(row: Row) -> bool:
    """A tensor that was drawn at random: no constant, and no bias or norm, which begin alike everywhere."""
    return row.numel >= _SMALLEST and row.min != row.max and len(row.shape) > 1


def _upcycled(first: Row, second: Row, copies: Iterable[tuple[Row, Row]]) -> bool:
    """Experts that were all copied from one dense layer are alike on purpose: within a rank too."""
    if "local_experts" not in first.name or layer_of(first.name) != layer_of(second.name):
        return False
    return any(
        a.rank == b.rank and a.name != b.name and layer_of(a.name) == layer_of(first.name) and "local_experts" in a.name
        for a, b in copies
    )


def distinct_samples(scene: Scene) -> list[Breach]:
    """Data-parallel ranks, the microbatches of a step, and steps read different samples."""
    found, looked = [], 0
    for part in ("input_ids", "labels"):
        before: dict[tuple[Any, ...], Row] = {}
        for step in scene.steps:
            seen: dict[tuple[Any, ...], Row] = {}
            for row in step.of("activation", "model", "input", part):
                if row.digest is None or row.phase != "forward" or row.numel < _SMALLEST:
                    continue
                # Virtual stages, and tensor- and pipeline-parallel ranks, read the same on purpose.
                if any(scene.at(row.rank, axis) for axis in ("tp", "pp")) or row.vpp:
                    continue
                looked += 1
                key = (row.digest, row.shape, scene.at(row.rank, "cp"))
                other = seen.setdefault(key, before.get(key, row))
                if other is not row and other.min != other.max:
                    found.append((other, row))
            before.update({key: row for key, row in seen.items() if key not in before})
    if not looked:
        raise NotChecked("digests of token ids: dump: {level: L0}")
    if found and scene.argument("mock_data") and len(found) < looked / 2:
        raise NotChecked("data: Megatron's mock samples are few and meet by chance")
    if not found:
        return []
    found.sort(key=lambda pair: pair[0].step != pair[1].step)
    first, second = found[0]
    where = at(second, ranks=sorted({first.rank, second.rank}), tensors=len(found))
    if first.step != second.step:
        text = f"step {second.step} reads samples of step {first.step} again (rank {second.rank})"
        unless = "expected only if the job trains on one batch or has gone through all its data"
        return [Breach(f"{text}: {second.path}; {len(found)} microbatches in all; {unless}", where, "note")]
    if first.rank != second.rank:
        text = f"data-parallel ranks {first.rank} and {second.rank} read the same samples ({moment(second)})"
    else:
        text = f"rank {second.rank} reads the samples of microbatch {first.microbatch} again ({moment(second)})"
    return [Breach(f"{text}: {second.path}; {len(found)} times in all", where)]


def shifted_labels(scene: Scene) -> list[Breach]:
    """Labels are the tokens shifted by one, never the tokens themselves."""
    found, looked = [], 0
    for step in scene.steps:
        groups: dict[tuple[Any, ...], dict[str, Row]] = defaultdict(dict)
        for row in step.of("activation", "model", "input"):
            if row.path in ("input_ids", "labels") and row.phase == "forward":
                groups[row.rank, row.vpp, row.microbatch][row.path] = row
        for parts in groups.values():
            tokens, labels = parts.get("input_ids"), parts.get("labels")
            if tokens is None or labels is None or tokens.digest is None or labels.digest is None:
                continue
            looked += 1
            if tokens.digest == labels.digest and tokens.min != tokens.max:
                found.append(labels)
    if not looked:
        raise NotChecked("digests of token ids and labels: dump: {level: L0}")
    if not found:
        return []
    text = f"labels are the very tokens, not shifted by one ({moment(found[0])}, rank {found[0].rank})"
    return [Breach(f"{text}; {len(found)} microbatches in all", at(found[0], tensors=len(found)))]


def counted_positions(scene: Scene) -> list[Breach]:
    """Learned positions count from 0 to the length of the sequence, once in each sample."""
    if scene.argument("position_embedding_type") != "learned_absolute" or scene.argument("reset_position_ids"):
        raise NotChecked("a model with learned positions that are not reset within a sample")
    found, looked = [], 0
    for step in scene.steps:
        groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
        for row in step.of("activation", "embedding", "input", "position_ids"):
            if row.phase == "forward" and len(row.shape) == 2:
                groups[row.microbatch, scene.at(row.rank, "dp"), scene.at(row.rank, "tp")].append(row)
        for rows in groups.values():
            if len(rows) != scene.size("cp"):
                continue
            looked += 1
            batch, length = rows[0].shape[0], sum(row.shape[1] for row in rows)
            total, squares = sum(row.sum for row in rows), sum(row.sumsq for row in rows)
            wanted = batch * length * (length - 1) / 2
            if total != wanted or squares != batch * (length - 1) * length * (2 * length - 1) / 6:
                found.append((rows[0], total, wanted))
    if not looked:
        raise NotChecked("the positions that the embedding takes: dump: {level: L0}")
    if not found:
        return []
    row, total, wanted = found[0]
    text = f"positions do not count every place once: their sum is {total:g}, not {wanted:g} ({moment(row)})"
    return [Breach(f"{text}; {len(found)} microbatches in all", at(row, value=total, expected=wanted))]


LAWS = (
    Law(
        "recompute",
        "a forward that is computed again gives the same bits",
        "dropout or random state not restored, a region that depends on changed state",
        "dump: {level: L0}",
        "nothing beyond the dump",
        recomputed,
        "compare the random state before both passes; look at what the region reads besides its inputs",
    ),
    Law(
        "handed-on",
        "the input of a layer is the output of the layer before, its gradient the other way round",
        "a stale receive buffer, microbatches in the wrong order, a layer on the wrong stage",
        "dump: {level: L0}",
        "nothing beyond the dump",
        handed_on,
        "record the messages between the stages: dump: {level: mix}",
    ),
    Law(
        "replicas",
        "ranks that share a weight hold the same bits of it, of its gradient and of its moments",
        "a reduction that is missing or local, silent corruption, a rank with stale weights",
        "dump, or monitor: {parameters: true}",
        "nothing beyond the dump",
        shared_weights,
        "compare with a golden run: msprobe-megatron compare GOLDEN RUN",
    ),
    Law(
        "replicated-activations",
        "what a tensor-parallel group holds whole has the same bits on all its ranks",
        "an all-reduce left out, different dropout where it must be the same, another constant on one rank",
        "dump: {level: L0}",
        "nothing beyond the dump",
        shared_activations,
        "the first module in the list is where ranks part",
    ),
    Law(
        "distinct-weights",
        "shards of a weight and weights of different layers are not copies",
        "one seed on all tensor- or expert-parallel ranks, a layer offset, a part loaded twice",
        "dump, or monitor: {parameters: true}",
        "nothing beyond the dump",
        distinct_weights,
        "look at the seeds of model-parallel ranks, and at what the checkpoint was loaded into",
    ),
    Law(
        "distinct-samples",
        "data-parallel ranks, microbatches and steps read different samples",
        "a sampler that does not know its rank, an iterator that begins anew with every microbatch or step",
        "dump: {level: L0}",
        "a digest for each integer tensor",
        distinct_samples,
        "look at the sampler: rank and size of its data-parallel group",
    ),
    Law(
        "labels",
        "labels are not the tokens themselves",
        "labels that were never shifted",
        "dump: {level: L0}",
        "a digest for each integer tensor",
        shifted_labels,
        "look at how the batch is made",
    ),
    Law(
        "positions",
        "learned positions count every place of a sample once",
        "positions without the offset of the context-parallel rank, or shifted",
        "dump: {level: L0}",
        "nothing beyond the dump",
        counted_positions,
        "look at how positions are cut over context-parallel ranks",
    ),
)
