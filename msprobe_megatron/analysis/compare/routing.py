"""Routing: tokens that two runs send to different experts, and what they can change behind the router.

The choice of experts is not continuous: a token on the edge between two experts goes to the other one by rounding, and
everything computed from it moves by far more than rounding. Runs record for every token which experts were chosen and
how far the choice was from the edge (`job/measure/routing.py`). If every token that is routed otherwise was on the edge
in both runs, the routers agree, and tensors behind them may differ by what so many tokens can change. If one of them
was far from the edge, the router itself is wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt

from msprobe_megatron.analysis.compare.match import Floats, Pairs
from msprobe_megatron.analysis.compare.merge import labelled_query, micro_batch_size
from msprobe_megatron.analysis.compare.pairs.assembly import covers, part_of, together
from msprobe_megatron.analysis.compare.pairs.tensor_pairs import Saved, read_saved
from msprobe_megatron.analysis.compare.verdict.tolerance import EPS, EPS32, Allowed, Scene
from msprobe_megatron.analysis.load.run import Run, RunError
from msprobe_megatron.analysis.load.saved_tensors import TensorFiles
from msprobe_megatron.topology.layers import layer_of
from msprobe_megatron.topology.shards import ShardSpec

Words = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
Touched = dict[tuple[int, int], Flags]
"""By step and sample: the positions whose tokens were routed otherwise."""
Places = Mapping[tuple[str, str, str], float]

_KIND = "routing"
_EDGE = 6.0
"""How many times the expected noise a margin may be: the difference of two scores, in the worst of many tokens."""
_MEASURED = 24.0
"""The same, of the smallest quarter of measured differences of margins."""
_ULPS = 4.0
_BEHIND, _DRIFTED = 4.0, 2.0
"""How much further scores may move behind a token that went elsewhere, and after weights have drifted."""
_COARSE, _MOST, _UNEVEN = 0.9, 0.5, 3.0
_ANYTHING = 2.0
"""More than any relative error."""


@dataclass(frozen=True)
class Router:
    """One router at one step in both runs."""

    name: str
    step: int
    tokens: int
    otherwise: int
    far: int
    """Tokens that were routed otherwise although they were far from the edge."""
    margin: float
    """The largest margin of a token that was routed otherwise."""
    allowed: float
    coarse: str
    """Set if the scores fit into bfloat16 in one run only: which one."""
    drifted: bool
    """True at steps before which the weights have moved."""
    by_sample: dict[int, tuple[int, int]] = field(repr=False, compare=False)
    """Tokens routed otherwise, and all tokens, of every sample."""

    def between(self, first: Floats, last: Floats, all_samples: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """Tokens routed otherwise, and all tokens, of samples `first` to `last`, or of all where that is not known."""
        samples = np.array(sorted(self.by_sample))
        sums = np.cumsum([(0, 0), *(self.by_sample[int(sample)] for sample in samples)], axis=0).astype(np.float64)
        low = np.where(all_samples, 0, np.searchsorted(samples, first))
        high = np.where(all_samples, len(samples), np.searchsorted(samples, last))
        missing = low >= high
        low, high = np.where(missing, 0, low), np.where(missing, len(samples), high)
        held = sums[high] - sums[low]
        return held[:, 0], held[:, 1]

    @property
    def wrong(self) -> bool:
        """True if rounding does not explain the difference."""
        return self.far > 0 or self.coarse != ""

    @property
    def text(self) -> str:
        """The finding in one sentence."""
        if self.far:
            return (
                f"{self.otherwise} of {self.tokens} tokens routed otherwise, {self.far} of them too far from the edge"
                f" for rounding (margin {self.margin:.2g} of the scores, {self.allowed:.2g} expected)"
            )
        if self.coarse:
            return f"the scores have the precision of bfloat16 in {self.coarse} only"
        since = " and the drift of the weights" if self.drifted else ""
        return f"{self.otherwise} of {self.tokens} tokens routed otherwise, all within rounding of the edge{since}"


class Routing:
    """All routers that both runs recorded, and what they allow the tensors behind them."""

    def __init__(self, routers: list[Router], fan: float) -> None:
        self.routers = routers
        self._fan = fan
        """Tokens over tokens of one expert: a share of all tokens may be that much larger at an expert."""

    @property
    def moved(self) -> list[Router]:
        """Routers that agree although they route some tokens otherwise."""
        return [router for router in self.routers if router.otherwise and not router.wrong]

    @property
    def noise(self) -> float:
        """Relative change of gradients that re-routed tokens explain: root of the largest share of a step."""
        shares: dict[int, float] = defaultdict(float)
        for router in self.moved:
            shares[router.step] += router.otherwise / router.tokens
        return min(float(np.sqrt(max(shares.values(), default=0.0))), 1.0)

    def wrong_results(self, pairs: Pairs) -> dict[int, Router]:
        """Results of routers that are wrong, by the index of their pair."""
        wrong = {(router.name, router.step): router for router in self.routers if router.wrong}
        results = np.isin(pairs["name"], [name for name, _ in wrong]) & (pairs["kind"] == "activation")
        found = np.flatnonzero(results & (pairs["io"] == "output") & (pairs["phase"] == "forward"))
        keys = {int(i): (str(pairs["name"][i]), int(pairs["step"][i])) for i in found}
        return {i: wrong[key] for i, key in keys.items() if key in wrong}

    def shares(self, pairs: Pairs, places: Places) -> Floats:
        """For every pair, the share of its tokens that routers before it have sent elsewhere, added up."""
        found = np.zeros(len(pairs))
        at = _choices(places)
        keys = zip(pairs["name"], pairs["io"], pairs["path"], strict=True)
        here = np.array([places.get(key, np.inf) for key in keys])
        forward = pairs["kind"] == "activation"
        whole_step = np.isnan(pairs["microbatch"].astype(np.float64))
        inside = np.array([".experts." in f"{name}." for name in pairs["name"]], bool)
        layers = np.array([_layer_or_none(name) for name in pairs["name"]])
        at_expert = _tokens_at_expert(pairs)
        first, last = pairs["block"] * pairs["unit"], (pairs["block"] + 1) * pairs["unit"]
        for router in self.moved:
            behind = (pairs["step"] == router.step) & (pairs["kind"] != "parameter") & (pairs["kind"] != "data")
            behind &= ~forward | (here >= at.get(router.name, np.inf))
            other, tokens = router.between(first, last, whole_step)
            same_layer = inside & (layers == _layer_or_none(router.name))
            tokens = np.where(same_layer, np.minimum(at_expert, tokens / self._fan), tokens)
            found += np.where(behind, other / np.maximum(tokens, 1.0), 0.0)
        return found

    def allow(self, pairs: Pairs, allowed: Allowed, shares: Floats) -> Allowed:
        """Tolerances with what re-routed tokens can change on top: a single element may be anything.

        Gradients of a router's scores are large for the few tokens whose choice matters to the loss.
        """
        room = _room(shares)
        routers = {router.name for router in self.moved}
        names = [str(name) for name in pairs["name"]]
        own = np.array([n.partition("/")[0] in routers or n.rpartition(".")[0] in routers for n in names], bool)
        own &= (pairs["kind"] != "activation") & (pairs["kind"] != "parameter")
        room = np.where(own, np.minimum(room + np.sqrt(shares), _ANYTHING), room)
        moved = shares > 0
        return Allowed(
            allowed.average + room,
            np.where(moved, np.maximum(allowed.extreme, _ANYTHING), allowed.extreme),
            np.where(moved, np.minimum(allowed.element + 2 * np.sqrt(shares), _ANYTHING), allowed.element),
        )

    def sentences(self, shares: Floats) -> list[str]:
        """What was found and how much was allowed for it."""
        if not self.moved:
            return []
        texts = [f"{router.name}, step {router.step}: {router.text}" for router in self.moved]
        few = [*texts[:3], *([f"and so in {len(texts) - 3} more routers and steps"] if len(texts) > 3 else [])]
        room = _room(shares)
        judged = room[(room > 0) & ~beyond_judgement(shares)]
        if len(judged):
            few.append(
                f"{len(judged)} tensors behind these routers were judged with room for tokens routed otherwise: norms"
                f" and sums may be off by up to {float(judged.max()):.2g} more (median"
                f" {float(np.median(judged)):.2g}); their extremes were not judged"
            )
        return few


_HALF_PRECISION = 1e-4
_FEW = 0.1
"""Share of tokens at other experts, from which on rounding does not explain it."""


def _choices(places: Places) -> dict[str, float]:
    """Where in the forward each module gives its result; a router recorded by its calls only, where it chooses."""
    modules: dict[str, float] = {}
    calls: dict[str, float] = {}
    for (name, io, _), place in places.items():
        module, _, call = name.partition("/")
        if io != "output":
            continue
        if not call:
            modules[module] = min(place, modules.get(module, place))
        elif "topk" in call or "top_k" in call:
            calls[module] = min(place, calls.get(module, place))
    return {**calls, **modules}


def _room(shares: Floats) -> Floats:
    """How much a share of re-routed tokens can change norms and sums; anything if most tokens are others."""
    room: Floats = np.where(beyond_judgement(shares), _ANYTHING, shares + np.sqrt(shares) / 8)
    return room


def beyond_judgement(shares: Floats) -> npt.NDArray[np.bool_]:
    """Where so many tokens were routed otherwise that the tensors of two runs need not have much in common."""
    return shares >= _MOST


def _tokens_at_expert(pairs: Pairs) -> Floats:
    """Tokens in the tensors of an expert, of the run that has fewer; infinite for all other tensors.

    Of tensors with one number per token (the probabilities and their gradients) a third: no width averages them, so one
    token may weigh several times the mean.
    """
    found = np.full(len(pairs), np.inf)
    numels, shapes = pairs.both("numel"), pairs.both("global_shape")
    for i in np.flatnonzero(pairs["tokens"] == "experts"):
        shape = shapes.left[i] if shapes.left[i] is not None else shapes.right[i]
        width = int(shape[-1]) if shape is not None and len(shape) > 1 else 1
        tokens = np.nan_to_num(min(float(numels.left[i]), float(numels.right[i]))) / max(width, 1)
        found[i] = tokens if width > 1 else tokens / _UNEVEN
    return found


def compare_routing(golden: Run, run: Run, step: int | None, pairs: Pairs, scene: Scene, allowed: Allowed) -> Routing:
    """Compare the choices of all routers that both runs recorded; empty if one recorded none."""
    left, right = (_recorded(side, step) for side in (golden, run))
    arguments = golden.facts.get("arguments", {})
    experts, topk = (arguments.get(name) for name in ("num_experts", "moe_router_topk"))
    known = isinstance(experts, int) and isinstance(topk, int) and topk > 0
    routers: list[Router] = []
    touched: Touched = {}
    for key in sorted(left.keys() & right.keys(), key=lambda key: (key[0], layer_of(key[1]) or 0, key[1])):
        found = _compared(key, left[key], right[key], _noise(pairs, key, scene, allowed), touched)
        if found is not None:
            routers.append(found)
    return Routing(routers, max(experts / topk, 1.0) if known else 4.0)


def unrecorded(pairs: Pairs, scene: Scene, routing: Routing, places: Places) -> npt.NDArray[np.bool_]:
    """Pairs behind experts that got a few tokens more or fewer, where no choices of routers were recorded.

    The monitor and imported runs have none: whether rounding sent these tokens elsewhere cannot be told, only that so
    few may. In float32 they are no rounding, and many are none in any precision.
    """
    lost = np.zeros(len(pairs), bool)
    experts = (pairs["tokens"] == "experts") & (pairs["kind"] == "activation") & pairs.in_both()
    if routing.routers or scene.eps < _HALF_PRECISION or not experts.any():
        return lost
    at = np.array([places.get(key, np.inf) for key in zip(pairs["name"], pairs["io"], pairs["path"], strict=True)])
    numels = pairs.both("numel").map(lambda column: np.nan_to_num(column.astype(np.float64)))
    layers = np.array([layer_of(name) if layer_of(name) is not None else -1 for name in pairs["name"]])
    forward = pairs["kind"] == "activation"
    for step in np.unique(pairs["step"]):
        own = experts & (pairs["step"] == step)
        for layer in np.unique(layers[own & (numels.left != numels.right)]):
            here = own & (layers == layer)
            moved = float(np.abs(numels.left - numels.right)[here].sum() / max(numels.left[here].sum(), 1.0)) / 2
            if moved > _FEW:
                return np.zeros(len(pairs), bool)
            behind = (pairs["step"] > step) | ((pairs["step"] == step) & (~forward | (at >= at[here].min())))
            lost |= behind & (pairs["kind"] != "data") & ((pairs["kind"] != "parameter") | (pairs["step"] > step))
    return lost


@dataclass(frozen=True)
class _Noise:
    """Noise of the scores of one router: of its input relative to its size, and the last place of the scores."""

    expected: float
    last_place: float
    same_input: bool
    drifted: bool = False
    """The weights have moved since they were equal: margins may differ by more than rounding of this step."""


def _noise(pairs: Pairs, key: tuple[int, str], scene: Scene, allowed: Allowed) -> _Noise:
    names = np.array([str(name).partition("/")[0] for name in pairs["name"]], object)
    own = (pairs["step"] == key[0]) & (names == key[1]) & (pairs["kind"] == "activation") & pairs.in_both()
    inputs, outputs = (np.flatnonzero(own & (pairs["io"] == io)) for io in ("input", "output"))
    # Tolerances of extremes are three times the expected noise of one element.
    expected = float(allowed.extreme[inputs].max()) / 3 if len(inputs) else scene.eps
    dtypes = pairs.both("dtype")
    last = [EPS.get(str(column[i]), 0.0) for i in outputs for column in dtypes]
    same = bool(len(inputs)) and all(dtypes.left[i] == dtypes.right[i] for i in inputs)
    return _Noise(expected, max(last, default=EPS32) or EPS32, same, key[0] > scene.first_step)


def _compared(
    key: tuple[int, str],
    left: dict[int, Words],
    right: dict[int, Words],
    noise: _Noise,
    touched: Touched,
) -> Router | None:
    """One router; `touched` collects the tokens that earlier routers have sent elsewhere."""
    step, name = key
    common = [s for s in sorted(left.keys() & right.keys()) if left[s].shape == right[s].shape]
    if not common:
        return None
    x, y = (np.stack([side[s] for s in common]) for side in (left, right))
    codes = [words[..., 0] >> 1 for words in (x, y)]
    margins = [np.ascontiguousarray(words[..., 1]).view(np.float32).astype(np.float64) for words in (x, y)]
    other = codes[0] != codes[1]
    margin = np.maximum(*margins)
    before = np.stack([touched.get((step, s), np.zeros(other.shape[1], bool)) for s in common])
    # Attention carries the change of a token that went elsewhere to the later tokens of its sample.
    behind = before.any(axis=1, keepdims=True) | np.zeros_like(other)
    limit = np.where(
        behind,
        _limit(margins, behind & ~other, noise, times=_BEHIND),
        _limit(margins, ~behind & ~other, noise, times=_DRIFTED if noise.drifted else 0.0),
    )
    # Its own scores are of another token by now: where it goes says nothing about this router.
    far = other & ~before & (margin > limit)
    touched.update({(step, s): moved for s, moved in zip(common, before | other, strict=True)})
    coarse = [float((words[..., 0] & 1).mean()) for words in (x, y)]
    which = ""
    if noise.same_input and max(coarse) > _COARSE and min(coarse) < 1 - _COARSE:
        which = "the golden run" if coarse[0] > coarse[1] else "the second run"
    worst = np.where(far, margin, 0.0) if far.any() else np.where(other, margin, 0.0)
    at = np.unravel_index(int(worst.argmax()), worst.shape)
    counts = {s: (int(moved), other.shape[1]) for s, moved in zip(common, other.sum(1), strict=True)}
    return Router(
        name=name,
        step=step,
        tokens=other.size,
        otherwise=int(other.sum()),
        far=int(far.sum()),
        margin=float(worst.max()),
        allowed=float(limit[at]),
        coarse=which,
        drifted=noise.drifted,
        by_sample=counts,
    )


def _limit(margins: list[Floats], among: Flags, noise: _Noise, *, times: float) -> float:
    """The largest margin that rounding explains: by theory, and by how far margins of tokens routed alike differ.

    Both must allow it; where an earlier difference is known to have moved the scores, `times` either of them suffices.
    """
    theory = _EDGE * noise.expected + _ULPS * noise.last_place
    apart = np.abs(margins[0] - margins[1])[among]
    measured = _MEASURED * float(np.quantile(apart, 0.25)) if apart.size else 0.0
    if times:
        return max(theory, measured) * times
    return min(theory, measured + _ULPS * noise.last_place) if apart.size else theory


def _recorded(run: Run, step: int | None) -> dict[tuple[int, str], dict[int, Words]]:
    """By step and router: the words of every sample, [positions, 2]."""
    connection = duckdb.connect()
    saved = read_saved(connection, labelled_query(connection, run, step, "routing", kinds=(_KIND, "loss")))
    size = micro_batch_size(run, run.rows(connection, step))
    files = TensorFiles(run)
    found: dict[tuple[int, str], dict[int, Words]] = {}
    for (at, phase, kind, name, _, _), rows in saved.items():
        if kind != _KIND or phase != "forward":
            continue
        samples: dict[int, list[Saved]] = defaultdict(list)
        for row in rows:
            samples[row.samples_from].append(row)
        words = found.setdefault((int(at), str(name)), {})
        for first, shards in samples.items():
            whole = _whole(run, files, int(at), shards)
            if whole is not None and whole.size % (2 * size) == 0:
                for index, of_sample in enumerate(np.moveaxis(whole.reshape(-1, size, 2), 1, 0)):
                    words[first + index] = of_sample
    return found


def _layer_or_none(name: str) -> int:
    layer = layer_of(name)
    return -1 if layer is None else layer


def _whole(run: Run, files: TensorFiles, step: int, rows: list[Saved]) -> Any:
    """The words of one microbatch of one data-parallel rank; None if a part is missing."""
    parts = []
    try:
        for row in rows:
            if row.whole is None:
                return None
            view = files.view(step, row.rank, row.tensor, row.shape)
            part = part_of(view, ShardSpec.parse(row.shard), row.whole, row.place, run.sizes, None)
            if part is None:
                return None
            parts.append(part)
    except RunError:  # without them, the tensors are judged as they are
        return None
    return together(parts, parts[0].whole) if parts and covers(parts, parts[0].whole) else None
