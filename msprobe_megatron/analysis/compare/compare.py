"""Comparing two runs of any two layouts: the verdict, the first divergence, the suspects.

The last station of the comparison: `merge` and `match` make pairs of whole tensors, `tolerance` and `judge` say
which differ, `order` and `causes` which of them came first and by itself, `differences` and `ranks` on which ranks and
where in the source. Here they are put together; `comparable` tells runs that are no pair from runs that differ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from msprobe_megatron.analyse.causes import DIVERGED, INHERITED, classify
from msprobe_megatron.analyse.comparable import different_models, lonely_weights, no_common_step, no_repetition
from msprobe_megatron.analyse.differences import Difference, data_differ, difference, each_once, replicas
from msprobe_megatron.analyse.hints import hints
from msprobe_megatron.analyse.judge import Judgement, distances, judge
from msprobe_megatron.analyse.load import Run
from msprobe_megatron.analyse.match import STATISTICS, Pairs, match
from msprobe_megatron.analyse.order import causal_order, forward_places
from msprobe_megatron.analyse.ranks import RankFinder
from msprobe_megatron.analyse.shard_rules import first_rule
from msprobe_megatron.analyse.summary import warnings
from msprobe_megatron.analyse.tensor_pairs import Progress, compare_tensors
from msprobe_megatron.analyse.tolerance import Floats, Scene, is_data, tolerances

AGREE, DIVERGED_VERDICT, INCOMPARABLE = "agree", "diverged", "incomparable"
SUSPECTS = 10
_REPLICAS = 20
_STATES = ("agree", "diverged", "inherited", "only_left", "only_right", "layout")


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
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_STATES, 0))
    replicas: list[dict[str, Any]] = field(default_factory=list)
    layout: dict[str, int] = field(default_factory=dict)
    hints: list[str] = field(default_factory=list)
    nearest: dict[str, Any] | None = None
    """Of what agrees, the tensor nearest to its limit, and which share of the limit its error is."""
    tensors: int = 0
    """How many were compared element by element, both runs having saved them."""
    table: pa.Table | None = field(default=None, repr=False, compare=False)
    """All tensors with their figures and states, in order of cause."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `--json`; an infinite error (numbers of non-finite elements differ) is null."""
        plain = asdict(replace(self, table=None))
        del plain["table"]
        for entry in (plain["first_divergence"], *plain["suspects"]):
            if entry is not None and not math.isfinite(entry["error"]):
                entry["error"] = None
        return plain


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

    Example::

        compare(open_run("one_card"), open_run("tp2_pp2")).verdict
    """
    steps = sorted(set(golden.steps) & set(run.steps))
    steps = steps if step is None else [n for n in steps if n == step]
    result = Comparison(str(golden.path), str(run.path), AGREE, "", steps)
    if not steps:
        return replace(result, verdict=INCOMPARABLE, reason=no_common_step(golden, run, step))
    pairs = match(golden, run, step)
    different = different_models(golden, run, pairs)
    if different:
        return replace(result, verdict=INCOMPARABLE, reason=different)
    repeated = None
    if noise is not None:
        repeated = match(golden, noise, step) if set(steps) & set(noise.steps) else None
        if odd_noise := no_repetition(golden, noise, step, repeated):
            return replace(result, verdict=INCOMPARABLE, reason=odd_noise)
    if noise is not None and repeated is not None:
        compare_tensors(golden, noise, step, repeated)
    if tensors:
        compare_tensors(golden, run, step, pairs, progress)
    judgement = _judge(golden, run, pairs, repeated)
    judgement.diverged |= lonely_weights(golden, run, pairs)
    if (golden.facts.get("gradient_scale") is None) != (run.facts.get("gradient_scale") is None):
        gradients = pairs["kind"] == "gradient"
        judgement.layout[gradients & (judgement.layout == "")] = "one run sums gradients per token, the other averages"
        judgement.diverged &= ~gradients
    order = causal_order(pairs, forward_places(golden))
    states = classify(pairs, judgement, order)
    counts = Counter(states)
    result = replace(
        result,
        counts={state: counts.get(state, 0) for state in _STATES},
        layout=dict(Counter(text for text, state in zip(judgement.layout, states, strict=True) if state == "layout")),
        hints=[*_told(golden, run, pairs), *_unmatched_rules(golden, run, pairs)],
        tensors=len(pairs.tensors.figures) if pairs.tensors is not None else 0,
        nearest=_nearest(pairs, judgement, states),
        table=_table(pairs, judgement, states, order),
    )
    found = [int(i) for i in order if states[i] in (DIVERGED, INHERITED)]
    if not found:
        return _nothing_differs(result, pairs)
    by_themselves = [i for i in found if states[i] == DIVERGED]
    rest = sorted((i for i in found if states[i] == INHERITED), key=lambda i: -_excess(judgement, i))
    chosen = each_once(pairs, [*by_themselves, *rest])[: SUSPECTS + 1]
    odd = [int(i) for i in order if judgement.replica[i]][:_REPLICAS]
    finder = RankFinder(golden, run, pairs, [*chosen, *odd])
    differences = [difference(run, finder, pairs, judgement, states, i) for i in chosen]
    batch = is_data(pairs) & np.isin(pairs["path"], ("input_ids", "labels"))
    data = [i for i in by_themselves if batch[i]]
    return replace(
        result,
        verdict=INCOMPARABLE if data else DIVERGED_VERDICT,
        reason=data_differ(pairs, judgement, data[0]) if data else "",
        first_divergence=differences[0],
        suspects=differences[1:],
        replicas=replicas(finder, pairs, judgement, odd),
        hints=[*hints(golden, run, pairs, states, by_themselves), *result.hints],
    )


def _judge(golden: Run, run: Run, pairs: Pairs, repeated: Pairs | None) -> Judgement:
    allowed = tolerances(pairs, Scene.of(golden, run, pairs))
    if repeated is not None:
        allowed = allowed.at_least(*_measured(repeated, pairs))
    padded = [side.facts.get("arguments", {}).get("padded_vocab_size") for side in (golden, run)]
    return judge(pairs, allowed, (padded[0], padded[1]) if all(padded) and padded[0] != padded[1] else None)


_TIMES_NOISE = 4.0


def _measured(repeated: Pairs, pairs: Pairs) -> tuple[Floats, Floats]:
    """Four times the distance between the golden run and its repetition, tensor by tensor."""
    keys, wanted = repeated.keys(), pairs.keys()
    found = []
    for measured in distances(repeated):
        by_key = dict(zip(keys, np.where(np.isfinite(measured), measured, 0.0), strict=True))
        found.append(_TIMES_NOISE * np.array([by_key.get(key, 0.0) for key in wanted]))
    return found[0], found[1]


def _told(golden: Run, run: Run, pairs: Pairs) -> list[str]:
    """What the runs themselves say is missing: a comparison of half a run must not look like one of all of it."""
    unread = pairs.tensors.problems[:2] if pairs.tensors is not None else []
    return [*(f"{side.path}: {text}" for side in (golden, run) for text in warnings(side)[:2]), *unread]


def _unmatched_rules(golden: Run, run: Run, pairs: Pairs) -> list[str]:
    """Shard specs that fit no tensor: a name that was written wrong must not pass for a merge."""
    rules = dict.fromkeys((*golden.shards, *run.shards))
    if not rules:
        return []
    tensors = set(zip(*(pairs[column].tolist() for column in ("kind", "name", "io", "path")), strict=True))
    lost = [rule for rule in rules if not any(first_rule([rule], *tensor) for tensor in tensors)]
    return [f"shards: {rule.name!r} fits no recorded tensor" for rule in lost]


def _nearest(pairs: Pairs, judgement: Judgement, states: Sequence[str]) -> dict[str, Any] | None:
    agreeing = np.array([state == "agree" for state in states], bool)
    if not agreeing.any():
        return None
    share = np.where(agreeing, judgement.error / judgement.tolerance, -1.0)
    i = int(share.argmax())
    return {name: str(pairs[name][i]) for name in ("name", "io", "kind")} | {"share": float(share[i])}


def _nothing_differs(result: Comparison, pairs: Pairs) -> Comparison:
    if result.counts["agree"]:
        return result
    reasons = ", ".join(result.layout) or "no tensor is in both"
    return replace(result, verdict=INCOMPARABLE, reason=f"nothing could be compared: {reasons}")


def _excess(judgement: Judgement, i: int) -> float:
    return float(judgement.error[i] / judgement.tolerance[i])


_SHOWN = ("step", "microbatch", "phase", "kind", "name", "io", "path", "op")


def _table(pairs: Pairs, judgement: Judgement, states: Sequence[str], order: Any) -> pa.Table:
    """Everything that was compared, as it was judged, in order of cause."""
    columns: dict[str, Any] = {name: pairs[name][order] for name in _SHOWN}
    columns["state"] = np.array(states, object)[order]
    columns["error"], columns["tolerance"] = judgement.error[order], judgement.tolerance[order]
    columns["reason"] = judgement.layout[order]
    columns["samples_from"] = (pairs["block"] * pairs["unit"])[order]
    if pairs.tensors is not None:
        for name, figure in (("relative_l2", "relative"), ("max_abs", "largest"), ("cosine", "cosine")):
            columns[name] = pairs.tensors.column(figure)[order]
    for name in (*STATISTICS, "dtype"):
        for side, text in (("l", "golden"), ("r", "run")):
            columns[f"{name}_{text}"] = pairs[f"{name}_{side}"][order]
    return pa.table(columns)


__all__ = ["Comparison", "Difference", "compare"]
