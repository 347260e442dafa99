"""Comparing two runs of any two layouts: the verdict, the first divergence, the suspects.

The last stage of the comparison: `merge` and `match` produce pairs of whole tensors, `tolerance` and `judge` decide
which of them differ, `causes` which of those came first and by themselves, `differences` on which ranks and where in
the source. `compare` runs them in this order; `comparable` rejects runs of different models or data.

What it finds, as `msprobe-megatron compare` prints it, for a job whose softmax scale is wrong under tensor parallelism
(`--practise mismatch` of the demo job, one process as golden run, TP2 beside it)::

    diverged one_card | tp2
    steps 0: 376 agree, 4 diverged, 737 inherited
    first divergence: decoder.layers.1.self_attention.core_attention.scale_mask_softmax input input
      look at decoder.layers.1.self_attention.core_attention
      step 0, microbatch 0, forward, layer 1, ranks 0-1
      norm 2.24926 vs 2.74722; relative error 1.8e-01, expected from rounding 1.3e-06
        megatron/core/transformer/dot_product_attention.py:210 forward
        megatron/core/transformer/attention.py:1150 forward
        megatron/core/transformer/transformer_layer.py:597 _forward_attention
        megatron/core/transformer/transformer_layer.py:513 forward
    hint: it is computed inside decoder.layers.1.self_attention.core_attention, between its submodules:
    check the code there (scale, mask, residual, activation function)
    further differences                                               step  mb  ranks    error  expected
    …er.layers.1.self_attention.core_attention gradient of input key     0   0    0-1  1.9e-01   2.4e-06
    …
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from msprobe_megatron.analysis.compare.bits import Bits, Repetition, chance, compare_bits
from msprobe_megatron.analysis.compare.comparable import (
    different_models,
    lonely_biases,
    lonely_weights,
    no_common_step,
    no_repetition,
    no_weights,
)
from msprobe_megatron.analysis.compare.match import STATISTICS, Floats, Pairs, match
from msprobe_megatron.analysis.compare.pairs.tensor_pairs import Progress, compare_tensors
from msprobe_megatron.analysis.compare.routing import Places, Routing, beyond_judgement, compare_routing, unrecorded
from msprobe_megatron.analysis.compare.verdict.causes import (
    DIVERGED,
    INHERITED,
    STATES,
    causal_order,
    classify,
    dropped_tokens,
    forward_places,
    hints,
)
from msprobe_megatron.analysis.compare.verdict.differences import (
    Difference,
    RankFinder,
    data_differ,
    describe,
    difference,
    each_once,
    replicas,
)
from msprobe_megatron.analysis.compare.verdict.judge import Judgement, distances, judge
from msprobe_megatron.analysis.compare.verdict.tolerance import Scene, is_data, tolerances
from msprobe_megatron.analysis.diagnose.summary import warnings
from msprobe_megatron.analysis.load.run import Run
from msprobe_megatron.analysis.load.shard_rules import first_rule

AGREE, DIVERGED_VERDICT, INCOMPARABLE = "agree", "diverged", "incomparable"
SUSPECTS = 10
_REPLICAS = 20
_TIMES_NOISE = 4.0

_UNRECORDED = "behind experts that got other tokens, and no choices of routers were recorded"


@dataclass(frozen=True)
class Comparison:
    """Everything that `msprobe-megatron compare` shows."""

    golden: str
    run: str
    verdict: str
    reason: str
    steps: list[int]
    first_divergence: Difference | None = None
    suspects: list[Difference] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATES, 0))
    replicas: list[dict[str, Any]] = field(default_factory=list)
    layout: dict[str, int] = field(default_factory=dict)
    hints: list[str] = field(default_factory=list)
    nearest: dict[str, Any] | None = None
    """Of the tensors that agree, the one closest to its tolerance, and its error as a share of the tolerance."""
    causes: list[dict[str, str]] = field(default_factory=list)
    """Between two implementations: usual causes of what was found, each with a stable id; see `analysis.align`."""
    bits: dict[str, int] | None = None
    """For two runs of one layout: how many tensors are equal in bits (`equal`) and how many are not (`differ`)."""
    tensors: int = 0
    """Number of tensors compared element by element, because both runs saved them."""
    table: pa.Table | None = field(default=None, repr=False, compare=False)
    """All tensors with their statistics and states, in causal order."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `--json`; an infinite error (numbers of non-finite elements differ) is null."""
        plain = asdict(replace(self, table=None))
        del plain["table"]
        for entry in (plain["first_divergence"], *plain["suspects"]):
            if entry is not None and not math.isfinite(entry["error"]):
                entry["error"] = None
        return plain


class _Judged(NamedTuple):
    """All pairs, how far each is off, what became of it, and the causal order."""

    pairs: Pairs
    judgement: Judgement
    states: list[str]
    order: npt.NDArray[np.int64]
    bits: Bits | None

    def in_state(self, state: str) -> list[int]:
        """Pairs of one state, in causal order."""
        return [int(i) for i in self.order if self.states[i] == state]


def compare(
    golden: Run,
    run: Run,
    step: int | None = None,
    noise: Run | None = None,
    progress: Progress | None = None,
    *,
    tensors: bool = True,
) -> Comparison:
    """Compare `run` with `golden`; `noise` is a repetition of `golden`, whose distance from it raises the tolerance.

    Saved tensors are compared element by element, unless `tensors` is False.
    """
    result = Comparison(str(golden.path), str(run.path), AGREE, "", _common_steps(golden, run, step))
    if not result.steps:
        return _incomparable(result, no_common_step(golden, run, step))
    pairs = match(golden, run, step)
    if reason := different_models(golden, run, pairs):
        return _incomparable(result, reason)
    repeated = None
    if noise is not None:
        if noise.path.resolve() == run.path.resolve():
            return _incomparable(result, f"--noise {noise.path} is the run that is compared, which excuses every fault")
        repeated = match(golden, noise, step) if set(result.steps) & set(noise.steps) else None
        if reason := no_repetition(golden, noise, step, repeated):
            return _incomparable(result, reason)
        if repeated is not None:
            compare_tensors(golden, noise, step, repeated)
    if tensors:
        compare_tensors(golden, run, step, pairs, progress)
    places = forward_places(golden)
    judgement, routing = _judge(golden, run, step, pairs, repeated, places)
    order = causal_order(pairs, places)
    bits = compare_bits(golden, run, step, pairs)
    judged = _Judged(pairs, judgement, classify(pairs, judgement, order), order, bits)
    again = Repetition(noise, repeated) if noise is not None and repeated is not None else None
    unlike = _judge_bits(golden, run, step, judged, again)
    result = _counted(result, golden, run, judged)
    lacking = no_weights(golden, run, pairs)
    result = replace(result, hints=[*result.hints, *routing, *unlike, *_not_judged(result)])
    if any(state in (DIVERGED, INHERITED) for state in judged.states):
        result = replace(result, hints=[*filter(None, [lacking]), *result.hints])
        return _diverged(result, golden, run, judged)
    return _agreed(result, lacking)


def _common_steps(golden: Run, run: Run, step: int | None) -> list[int]:
    steps = sorted(set(golden.steps) & set(run.steps))
    return steps if step is None else [n for n in steps if n == step]


def _incomparable(result: Comparison, reason: str) -> Comparison:
    return replace(result, verdict=INCOMPARABLE, reason=reason)


def _not_judged(result: Comparison) -> list[str]:
    """What an `agree` does not cover where the choices of routers are not known."""
    count = result.layout.get(_UNRECORDED)
    if not count:
        return []
    return [
        f"{count} tensors behind routers were not judged; a dump (dump: {{level: L0}}) records the choices that decide"
    ]


def _judge(
    golden: Run, run: Run, step: int | None, pairs: Pairs, repeated: Pairs | None, places: Places
) -> tuple[Judgement, list[str]]:
    """Errors beside their tolerances, and pairs that are excluded or count as divergent whatever their error.

    Also sentences about tokens that were routed otherwise.
    """
    scene = Scene.of(golden, run, pairs)
    allowed = tolerances(pairs, scene)
    routing = compare_routing(golden, run, step, pairs, scene, allowed)
    if routing.moved:
        allowed = tolerances(pairs, replace(scene, rerouted=routing.noise))
    if repeated is not None:
        allowed = allowed.at_least(*_measured_noise(repeated, pairs))
    shares = routing.shares(pairs, places)
    padded = [side.facts.get("arguments", {}).get("padded_vocab_size") for side in (golden, run)]
    vocabulary = (padded[0], padded[1]) if all(padded) and padded[0] != padded[1] else None
    judgement = judge(pairs, routing.allow(pairs, allowed, shares), vocabulary, allowed)
    _mark_routers(pairs, judgement, routing)
    lost = pairs.in_both() & (judgement.layout == "") & ~judgement.diverged & beyond_judgement(shares)
    judgement.layout[lost] = "most of its tokens may be others: routed otherwise, within rounding of the edge"
    unknown = unrecorded(pairs, scene, routing, places) & (judgement.layout == "")
    judgement.layout[unknown] = _UNRECORDED
    judgement.diverged &= ~unknown
    # One token more or less turns the direction in which the bias of a router moves.
    turned = (pairs["kind"] == "buffer") & np.isin(pairs["step"], [router.step for router in routing.moved])
    judgement.layout[turned & pairs.in_both()] = "state of routers that sent tokens elsewhere, within rounding"
    judgement.diverged &= ~turned
    judgement.diverged |= lonely_weights(golden, run, pairs) | lonely_biases(pairs)
    if (golden.facts.get("gradient_scale") is None) != (run.facts.get("gradient_scale") is None):
        gradients = pairs["kind"] == "gradient"
        judgement.layout[gradients & (judgement.layout == "")] = "one run sums gradients per token, the other averages"
        judgement.diverged &= ~gradients
    return judgement, routing.sentences(shares)


def _mark_routers(pairs: Pairs, judgement: Judgement, routing: Routing) -> None:
    """Routers whose choices rounding does not explain diverge, whatever the statistics of their results."""
    comparable = pairs.in_both() & (judgement.layout == "")
    for i, router in routing.wrong_results(pairs).items():
        if not comparable[i]:
            continue
        judgement.found[i] = router.text
        if not judgement.diverged[i]:
            judgement.error[i] = max(router.margin, 2 * router.allowed, 2 * float(judgement.tolerance[i]))
            judgement.tolerance[i] = max(router.allowed, float(judgement.tolerance[i]))
        judgement.diverged[i] = True


def _judge_bits(golden: Run, run: Run, step: int | None, judged: _Judged, again: Repetition | None) -> list[str]:
    """The first difference in bits that no tolerance shows: a divergence if it is no chance, otherwise a hint."""
    pairs, judgement, states, order, bits = judged
    if bits is None:
        return []
    i = bits.first(order, pairs.in_both() & (judgement.layout == ""))
    if i is None or states[i] in (DIVERGED, INHERITED):
        return []
    why = chance(golden, run, step, pairs, i, again)
    if why:
        place = " ".join(text for text in (str(pairs[column][i]) for column in ("name", "kind", "io", "path")) if text)
        return [f"bits differ, within rounding, from {place} of step {pairs['step'][i]} on; {why}"]
    states[i] = DIVERGED
    dtypes = pairs.both("dtype").map(lambda column: str(column[i]))
    what = "{} vs {}, ".format(*dtypes) if dtypes.left != dtypes.right else ""
    judgement.found[i] = f"differs in bits, within rounding: {what}{describe(pairs, judgement, i)}"
    judgement.ranks[i] = bits.ranks.get(i, [])
    return []


def _measured_noise(repeated: Pairs, pairs: Pairs) -> tuple[Floats, Floats]:
    """Four times the distance between the golden run and its repetition, per tensor."""
    keys, wanted = repeated.keys(), pairs.keys()
    found = []
    for measured in distances(repeated):
        by_key = dict(zip(keys, np.where(np.isfinite(measured), measured, 0.0), strict=True))
        found.append(_TIMES_NOISE * np.array([by_key.get(key, 0.0) for key in wanted]))
    return found[0], found[1]


def _counted(result: Comparison, golden: Run, run: Run, judged: _Judged) -> Comparison:
    """The result with its counts, its table and the warnings of both runs; no verdict yet."""
    pairs, judgement, states, order, bits = judged
    counts = Counter(states)
    return replace(
        result,
        counts={state: counts.get(state, 0) for state in STATES},
        layout=dict(Counter(text for text, state in zip(judgement.layout, states, strict=True) if state == "layout")),
        hints=[*_warnings(golden, run, pairs), *_unmatched_rules(golden, run, pairs)],
        tensors=len(pairs.tensors.results) if pairs.tensors is not None else 0,
        nearest=_nearest(pairs, judgement, states),
        bits=None if bits is None or not bits.known else bits.counts(),
        table=_table(judged),
    )


def _warnings(golden: Run, run: Run, pairs: Pairs) -> list[str]:
    """Warnings of the runs themselves: comparing half a run must not look like comparing all of it."""
    unread = pairs.tensors.problems[:2] if pairs.tensors is not None else []
    return [*(f"{side.path}: {text}" for side in (golden, run) for text in warnings(side)[:2]), *unread]


def _unmatched_rules(golden: Run, run: Run, pairs: Pairs) -> list[str]:
    """Shard specs of the user that match no tensor: a misspelt name must not look like a successful merge."""
    rules = dict.fromkeys((*golden.shards, *run.shards))
    if not rules:
        return []
    tensors = set(zip(*(pairs[column].tolist() for column in ("kind", "name", "io", "path")), strict=True))
    lost = [rule for rule in rules if not any(first_rule([rule], *tensor) for tensor in tensors)]
    return [f"shards: {rule.name!r} matches no recorded tensor" for rule in lost]


def _nearest(pairs: Pairs, judgement: Judgement, states: Sequence[str]) -> dict[str, Any] | None:
    agreeing = np.array([state == "agree" for state in states], bool)
    if not agreeing.any():
        return None
    share = np.where(agreeing, judgement.error / judgement.tolerance, -1.0)
    i = int(share.argmax())
    return {name: str(pairs[name][i]) for name in ("name", "io", "kind")} | {"share": float(share[i])}


def _agreed(result: Comparison, lacking: str) -> Comparison:
    if lacking:
        return _incomparable(result, f"{lacking}; what both recorded before agrees")
    if result.counts["agree"]:
        return result
    reasons = ", ".join(result.layout) or "no tensor is in both runs"
    return _incomparable(result, f"nothing could be compared: {reasons}")


def _diverged(result: Comparison, golden: Run, run: Run, judged: _Judged) -> Comparison:
    """The result with the first divergence, the suspects after it, and hints."""
    pairs, judgement, states, order, _ = judged
    by_themselves = judged.in_state(DIVERGED)
    inherited = sorted(judged.in_state(INHERITED), key=lambda i: -float(judgement.error[i] / judgement.tolerance[i]))
    chosen = each_once(pairs, [*by_themselves, *inherited])[: SUSPECTS + 1]
    unequal = [int(i) for i in order if judgement.replica[i]][:_REPLICAS]
    finder = RankFinder(golden, run, pairs, [*chosen, *unequal])
    found = [difference(run, finder, pairs, judgement, states, i) for i in chosen]
    batch = is_data(pairs) & np.isin(pairs["path"], ("input_ids", "labels"))
    data = [i for i in by_themselves if batch[i]]
    reason = data_differ(pairs, judgement, data[0]) if data else ""
    usual, dropped = hints(golden, run, pairs, states, by_themselves), dropped_tokens(golden, run)
    if dropped and not reason and str(pairs["op"][chosen[0]]).endswith("Router"):
        reason = f"from {pairs['name'][chosen[0]]} on the runs drop different tokens: {dropped}"
    return replace(
        result,
        verdict=INCOMPARABLE if reason else DIVERGED_VERDICT,
        reason=reason,
        first_divergence=found[0],
        suspects=found[1:],
        replicas=replicas(finder, pairs, judgement, unequal),
        hints=[text for text in (*usual, *result.hints) if text not in reason],
    )


_KEY_COLUMNS = ("step", "microbatch", "phase", "kind", "name", "io", "path", "op")


def _table(judged: _Judged) -> pa.Table:
    """Everything that was compared, as it was judged, in causal order."""
    pairs, judgement, states, order, bits = judged
    columns: dict[str, Any] = {name: pairs[name][order] for name in _KEY_COLUMNS}
    columns["state"] = np.array(states, object)[order]
    columns["error"], columns["tolerance"] = judgement.error[order], judgement.tolerance[order]
    columns["reason"] = judgement.layout[order]
    if bits is not None:
        columns["bits"] = np.where(bits.equal, "equal", np.where(bits.differ, "differ", ""))[order]
    columns["samples_from"] = (pairs["block"] * pairs["unit"])[order]
    if pairs.tensors is not None:
        for name, result in (("relative_l2", "relative"), ("max_abs", "largest"), ("cosine", "cosine")):
            columns[name] = pairs.tensors.column(result)[order]
    for name in (*STATISTICS, "dtype"):
        both = pairs.both(name)
        columns[f"{name}_golden"], columns[f"{name}_run"] = both.left[order], both.right[order]
    return pa.table(columns)


__all__ = ["Comparison", "Difference", "compare"]
