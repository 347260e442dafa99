"""Causes: which of the differing tensors diverged by themselves, which inherited the difference, and usual reasons.

`causal_order` sorts tensors by their place in the dataflow of a step, whatever the layout. Sequence numbers count on
one rank only, and a pipeline interleaves microbatches; all layouts share the order in which one microbatch passes
through the model: stage by stage (chunk = vpp * pp + pp rank), and inside a stage by the rank's own sequence. The
backward goes the same way back; weights come before everything that uses them, reduced gradients after everything.

`classify` calls a module's result `diverged` when everything it is computed from agrees: its inputs (for a gradient:
the gradient of its output, and what the forward saved), its weights, and every module inside it. Anything else is
`inherited`; so is a tensor that differs less than an earlier one in the same samples, because a difference may fall
below the tolerance for a while and rise above it again.

`hints` names the usual reason of a pattern of differences; no verdict depends on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt

from msprobe_megatron.analysis.compare.match import Pairs
from msprobe_megatron.analysis.compare.verdict.judge import Judgement
from msprobe_megatron.analysis.compare.verdict.tolerance import is_gradient_norm, is_updated_weight
from msprobe_megatron.analysis.load.run import Run
from msprobe_megatron.topology.layers import layer_of

STATES = ("agree", "diverged", "inherited", "only_left", "only_right", "layout")
AGREE, DIVERGED, INHERITED, ONLY_LEFT, ONLY_RIGHT, LAYOUT = STATES
_TIED = {"embedding.word_embeddings": ("output_layer",)}


def classify(pairs: Pairs, judgement: Judgement, order: npt.NDArray[np.int64]) -> list[str]:
    """State of every pair; `order` is the causal order."""
    diverged, layout = judgement.diverged, judgement.layout
    excess = judgement.error / judgement.tolerance
    states = np.full(len(pairs), AGREE, dtype=object)
    states[layout != ""] = LAYOUT
    states[~pairs["right_has"].astype(bool)] = ONLY_LEFT
    states[~pairs["left_has"].astype(bool)] = ONLY_RIGHT
    known = _Differing()
    samples = last_sample(pairs)
    columns = (pairs["step"], samples, _causal_kinds(pairs), pairs["name"], pairs["io"])
    for i in order[diverged[order]]:
        step, sample, kind, name, io = (column[i] for column in columns)
        inherited = known.explains(step, sample, kind, name, io) or known.larger(step, sample, kind, excess[i])
        states[i] = INHERITED if inherited else DIVERGED
        known.add(step, sample, kind, name, io, excess[i])
    return [str(state) for state in states]


def culprit(kind: str, name: str, io: str) -> str:
    """The module to look at when this tensor is the first to differ.

    A module or a call computes its own result; its input was computed by what encloses it: the module around it.

    Example::

        >>> culprit("activation", "decoder.layers.1.mlp.linear_fc2", "input")
        'decoder.layers.1.mlp'
    """
    if kind not in ("activation", "gradient"):
        return name.rpartition(".")[0] if io == "weight" else name
    if (kind == "activation") == (io == "output"):
        return name
    if "/" in name:
        return name.partition("/")[0]
    if name == "model":
        return "data" if kind == "activation" else "loss"
    around = name.rpartition(".")[0].removesuffix(".layers").removesuffix(".local_experts")
    return around or "model"


class _Differing:
    """Tensors found to differ so far, while going through the pairs in causal order."""

    def __init__(self) -> None:
        self.first_step: int | None = None
        self.in_sample: dict[tuple[int, int], float] = defaultdict(float)
        self.modules: dict[tuple[int, int], set[tuple[str, str, str]]] = defaultdict(set)
        self.inside: dict[tuple[int, int], set[tuple[str, str]]] = defaultdict(set)
        self.weights: set[tuple[int, str]] = set()
        self.anywhere: set[tuple[int, str, str, str]] = set()
        self.in_step: set[int] = set()
        self.by_weights: dict[int, float] = defaultdict(float)

    def add(self, step: Any, sample: Any, kind: str, name: str, io: str, excess: float) -> None:
        """Record a tensor that differs."""
        if self.first_step is None:
            self.first_step = int(step)
        self.in_step.add(step)
        if kind == "parameter":
            self.weights.update((step, holder) for holder in _holders(name))
            self.by_weights[step] = max(self.by_weights[step], excess)
            return
        self.anywhere.add((step, kind, name, io))
        self.in_sample[step, sample] = max(self.in_sample[step, sample], excess)
        self.modules[step, sample].add((kind, name, io))
        self.inside[step, sample].update((kind, holder) for holder in _holders(name))

    def larger(self, step: Any, sample: Any, kind: str, excess: float) -> bool:
        """True if an earlier tensor of the same samples differs by more."""
        before = max(self.in_sample[step, sample], self.by_weights[step])
        return kind in ("activation", "gradient") and before >= excess

    def explains(self, step: Any, sample: Any, kind: str, name: str, io: str) -> bool:
        """True if a tensor that is already known to differ can be the cause of this one."""
        if self.first_step is not None and step > self.first_step:
            return True
        if kind in ("activation", "gradient"):
            result = (kind == "activation") == (io == "output")
            return self._result(step, sample, kind, name) if result else self.in_sample[step, sample] > 0
        if kind == "grad_reduced":
            return self._weight_gradient(step, name)
        return kind != "parameter" and step in self.in_step

    def _result(self, step: Any, sample: Any, kind: str, name: str) -> bool:
        here, inside = self.modules[step, sample], self.inside[step, sample]
        if (step, name) in self.weights or ("activation", name) in inside or ("activation", name, "input") in here:
            return True
        if kind == "activation":
            return False
        saved_by_forward = ("activation", name, "output") in here
        return saved_by_forward or ("gradient", name, "output") in here or ("gradient", name) in inside

    def _weight_gradient(self, step: Any, name: str) -> bool:
        owner = name.rpartition(".")[0]
        return any(
            (step, what, module, side) in self.anywhere
            for module in (owner, *_TIED.get(owner, ()))
            for what, side in (("activation", "input"), ("activation", "output"), ("gradient", "output"))
        )


def _holders(name: str) -> list[str]:
    """All modules that enclose a module, a weight or an API call, the model itself included."""
    module, call, _ = name.partition("/")
    parts = module.split(".")
    around = ["model", *(".".join(parts[:n]) for n in range(1, len(parts)))] if module != "model" else []
    return [*around, module] if call else around


_STAGE = 1 << 40
_UNKNOWN = float(1 << 60)
_PHASES = {"forward": 0, "recompute": 1, "backward": 2, "optimizer": 3}

_SQL_FORWARD = """
with first as (select min(step) as step, min(microbatch) as microbatch from steps_view
               where phase = 'forward' and kind = 'activation')
select name, io, path, min((coalesce(vpp, 0) * {stages} + pp) * {stage} + seq) as place
from steps_view join first using (step, microbatch)
where phase = 'forward' and kind = 'activation' group by name, io, path
"""


def forward_places(run: Run) -> dict[tuple[str, str, str], float]:
    """Position of every (name, io, path) in the forward of one microbatch."""
    connection = duckdb.connect()
    connection.register("steps_view", run.rows(connection, (run.dumped_steps or run.steps)[0]))
    query = _SQL_FORWARD.format(stages=run.sizes.get("pp", 1), stage=_STAGE)
    return {(name, io, path): float(place) for name, io, path, place in connection.query(query).fetchall()}


def causal_order(pairs: Pairs, places: dict[tuple[str, str, str], float]) -> npt.NDArray[np.int64]:
    """Indices of all pairs, causes before their possible effects."""
    modules: dict[str, float] = {}
    for (name, io, _), place in places.items():
        if io == "output":
            modules[name] = max(place, modules.get(name, 0.0))
    kinds, names = _causal_kinds(pairs), pairs["name"]
    keys = zip(names, pairs["io"], pairs["path"], strict=True)
    forward = np.array([places.get(key, modules.get(key[0].rpartition(".")[0], _UNKNOWN)) for key in keys])
    # Without forward rows (data_mode: backward) the order of one rank is all there is.
    seq = np.nan_to_num(pairs.both("seq").left.astype(np.float64), nan=_UNKNOWN)
    backward = np.isin(kinds, ("gradient", "grad_reduced", "grad_clipped", "optimizer_state", "update"))
    along = np.where(backward, -forward, forward)
    stage = np.where(kinds == "parameter", 0, np.where(np.isnan(pairs["microbatch"].astype(np.float64)), 2, 1))
    phase = np.array([_PHASES.get(text, 3) for text in pairs["phase"]])
    phase = np.where(kinds == "loss", 0, phase)
    rank_of_kind = np.array([_KINDS.index(kind) if kind in _KINDS else len(_KINDS) for kind in kinds])
    return np.lexsort((seq, along, rank_of_kind, phase, last_sample(pairs), stage, pairs["step"]))


def _causal_kinds(pairs: Pairs) -> npt.NDArray[np.object_]:
    """Kinds by their place in a step: weights after the optimizer are as late as updates, the norm as clipping."""
    kinds = np.where(is_updated_weight(pairs), "update", pairs["kind"])
    found: npt.NDArray[np.object_] = np.where(is_gradient_norm(pairs), "grad_clipped", kinds)
    return found


def last_sample(pairs: Pairs) -> npt.NDArray[np.int64]:
    """Last sample that each tensor was computed from: no cause of the tensor belongs to a later one.

    Tokens of several data-parallel ranks meet at an expert: samples that meet count as one, so that an expert's tensors
    come after the inputs and before the outputs of all these samples.
    """
    whole_step = np.isnan(pairs["microbatch"].astype(np.float64))
    experts = pairs["tokens"] == "experts"
    group = int(pairs["unit"][experts].max()) if experts.any() else 1
    last = (pairs["block"] + 1) * pairs["unit"] - 1
    last = (last // group + 1) * group - 1
    together: npt.NDArray[np.int64] = np.where(whole_step, 0, last).astype(np.int64)
    return together


_KINDS = ("loss", "activation", "gradient", "parameter", "grad_reduced", "grad_clipped", "optimizer_state", "update")


_MANY = 0.9
_SPREAD = 0.02


def hints(golden: Run, run: Run, pairs: Pairs, states: Sequence[str], order: Sequence[int]) -> list[str]:
    """Usual reasons of what was found; `order` lists the tensors that diverged by themselves, causes first."""
    found = [
        *filter(None, [dropped_tokens(golden, run)]),
        *_unreduced_experts(run, pairs, order),
        *_balancing(golden, run),
        *_dropout(golden, run),
        *_padding(golden, run),
        *_layers(run),
        *_weights(pairs, states),
        *_factor(pairs, states),
    ]
    first = order[0] if order else None
    if first is not None and pairs["kind"][first] == "grad_reduced":
        found.append(
            "all recorded activations and activation gradients before it agree: check how this weight's gradient"
            " is accumulated over microbatches and reduced over ranks"
        )
    if first is not None and is_gradient_norm(pairs)[first]:
        found.append(
            "all recorded gradients before it agree: check how the norm is computed (each shard counted once, reduced"
            " over all model-parallel ranks, experts included)"
        )
    if first is not None and pairs["kind"][first] in ("activation", "gradient") and _is_input(pairs, first):
        found.append(_input_hint(*(str(pairs[column][first]) for column in ("kind", "name", "io"))))
    return found


def _input_hint(kind: str, name: str, io: str) -> str:
    """Where to look when the input of a module is the first tensor that differs."""
    module = culprit(kind, name, io)
    if name.endswith(f"layers.{layer_of(name)}") or "." not in name or module == name:
        return "it is the input of the module: check what produces it (communication, residual, schedule)"
    return (
        f"it is computed inside {module}, between its submodules: check the code there (scale, mask, residual,"
        " activation function)"
    )


def doubled_layers(run: Run) -> dict[int, list[tuple[int, int]]]:
    """Layers held by more than one stage, with the (rank, virtual stage) that hold them."""
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
        + "; check the layer offset of the stages"
        for layer, holders in sorted(doubled_layers(run).items())[:2]
    ]


def _is_input(pairs: Pairs, i: int) -> bool:
    return bool((pairs["kind"][i] == "activation") == (pairs["io"][i] == "input"))


def dropped_tokens(golden: Run, run: Run) -> str:
    """Why routers of correct runs choose differently: the capacity of experts is counted on each rank; else empty.

    Megatron counts it over the tokens that one rank has: its part of the sequence (TP with sequence parallelism, CP) of
    its microbatch. Other data-parallel or expert-parallel sizes drop the same tokens.
    """
    arguments = [side.facts.get("arguments", {}) for side in (golden, run)]
    limits = [given.get("moe_expert_capacity_factor") for given in arguments]
    counted = [
        (side.sizes.get("tp", 1) * side.sizes.get("cp", 1), given.get("micro_batch_size"))
        for side, given in zip((golden, run), arguments, strict=True)
    ]
    if all(limit is None for limit in limits) or (counted[0] == counted[1] and limits[0] == limits[1]):
        return ""
    return (
        f"moe_expert_capacity_factor is {limits[0]} and {limits[1]}: Megatron drops tokens by the capacity per rank,"
        " so that these layouts drop different tokens, and the router need not be at fault; compare without a capacity"
        " factor, or with equal TP x CP and micro-batch size"
    )


def _balancing(golden: Run, run: Run) -> list[str]:
    """Megatron computes the balancing loss of routers for each microbatch: of other sizes it is another loss."""
    given = [side.facts.get("arguments", {}) for side in (golden, run)]
    sizes = [arguments.get("micro_batch_size") for arguments in given]
    if not any(arguments.get("moe_aux_loss_coeff") for arguments in given) or sizes[0] == sizes[1]:
        return []
    return [
        f"micro_batch_size is {sizes[0]} and {sizes[1]}: the balancing loss of routers (moe_aux_loss_coeff) is one"
        " of each microbatch, so that the gradients of routers differ; compare with equal sizes, or with coefficient 0"
    ]


def _unreduced_experts(run: Run, pairs: Pairs, order: Sequence[int]) -> list[str]:
    """Megatron takes weights of experts for dense ones where EP is 1, also if ETP is not TP (docs/found.md)."""
    tp, etp, ep = (run.sizes.get(axis, 1) for axis in ("tp", "etp", "ep"))
    if not order or tp == etp or ep > 1:
        return []
    first = order[0]
    if pairs["kind"][first] != "grad_reduced" or ".experts." not in str(pairs["name"][first]):
        return []
    return [
        f"TP {tp} with ETP {etp} and EP 1: Megatron (0.16 at least) does not add up the gradients of experts over the"
        " TP ranks, so that their weights drift apart; train with EP > 1 or with ETP = TP (docs/found.md)"
    ]


def _dropout(golden: Run, run: Run) -> list[str]:
    for side in (golden, run):
        section = side.facts.get("probe", {}).get("content", {}).get("reproduce")
        if isinstance(section, dict) and not section.get("dropout"):
            continue  # switched off by the kit
        for name in ("attention_dropout", "hidden_dropout"):
            if side.facts.get("arguments", {}).get(name):
                return [f"{name} is not 0 in {side.path}: random numbers differ between layouts; set it to 0"]
    return []


def _padding(golden: Run, run: Run) -> list[str]:
    """Padding rows of the vocabulary take part in the loss: different padding gives a different loss."""
    sizes = [side.facts.get("arguments", {}).get("padded_vocab_size") for side in (golden, run)]
    if not all(isinstance(size, int) for size in sizes) or sizes[0] == sizes[1]:
        return []
    return [
        f"the vocabulary is padded to {sizes[0]} and to {sizes[1]}, and the loss includes the padding: choose"
        " --make-vocab-size-divisible-by so that both are padded to the same size"
    ]


def _weights(pairs: Pairs, states: Sequence[str]) -> list[str]:
    given = (pairs["kind"] == "parameter") & ~is_updated_weight(pairs)
    weights = np.flatnonzero(given & (pairs["step"] == pairs["step"].min())).tolist()
    differ = sum(states[i] == "diverged" for i in weights)
    if len(weights) and differ > 0.5 * len(weights):
        return [f"{differ} of {len(weights)} weights differ from the start: load the same checkpoint into both runs"]
    return []


def _factor(pairs: Pairs, states: Sequence[str]) -> list[str]:
    """All gradients off by one factor: the loss is scaled differently."""
    gradients = np.flatnonzero((pairs["kind"] == "gradient") & (pairs["step"] == pairs["step"].min())).tolist()
    differ = [i for i in gradients if states[i] in ("diverged", "inherited")]
    if not len(gradients) or len(differ) < _MANY * len(gradients):
        return []
    with np.errstate(all="ignore"):
        squares = pairs.both("sumsq").map(lambda column: column[differ])
        ratios = np.sqrt(squares.right / squares.left)
    ratios = ratios[np.isfinite(ratios)]
    if not len(ratios):
        return []
    middle = float(np.median(ratios))
    if middle == 0 or abs(middle - 1) < 2 * _SPREAD or np.mean(np.abs(ratios / middle - 1) < _SPREAD) < _MANY:
        return []
    return [f"all gradients are {middle:.4g} times those of the golden run: check how the loss is averaged"]
