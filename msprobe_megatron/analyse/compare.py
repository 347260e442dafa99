"""Comparing two runs of any two layouts: the verdict, the first divergence, the suspects.

The last station of the comparison: `merge` and `match` make pairs of whole tensors, `tolerance` and `judge` say
which differ, `order` and `causes` which of them came first and by itself, `places` on which ranks and where in the
source. Here they are put together, and runs that cannot be compared are told apart from runs that differ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from msprobe_megatron.analyse.causes import DIVERGED, INHERITED, classify, culprit
from msprobe_megatron.analyse.hints import hints
from msprobe_megatron.analyse.judge import Judgement, errors, judge, scales
from msprobe_megatron.analyse.load import Run
from msprobe_megatron.analyse.match import STATISTICS, Pairs, match
from msprobe_megatron.analyse.order import causal_order, forward_places
from msprobe_megatron.analyse.ranks import RankFinder
from msprobe_megatron.analyse.tolerance import Floats, Scene, is_data, tolerances
from msprobe_megatron.topology.layers import layer_of

AGREE, DIVERGED_VERDICT, INCOMPARABLE = "agree", "diverged", "incomparable"
SUSPECTS = 10
_REPLICAS = 20
_STATES = ("agree", "diverged", "inherited", "only_left", "only_right", "layout")


@dataclass(frozen=True)
class Difference:
    """One tensor that differs. `microbatch` counts as the golden run does; `samples` are [first, last + 1).

    `module` is where to look: the module itself if this is its result, the one around it if it is what arrives.
    """

    module: str
    name: str
    io: str
    path: str
    kind: str
    step: int
    microbatch: int | None
    samples: tuple[int, int] | None
    phase: str
    layer: int | None
    ranks: list[int]
    site: dict[str, Any] | None
    error: float
    tolerance: float
    state: str
    what: str


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
    counts: dict[str, int] = field(default_factory=dict)
    replicas: list[dict[str, Any]] = field(default_factory=list)
    layout: dict[str, int] = field(default_factory=dict)
    hints: list[str] = field(default_factory=list)
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


def compare(golden: Run, run: Run, step: int | None = None, noise: Run | None = None) -> Comparison:
    """Compare `run` with `golden`; `noise` is a repetition of `golden`, whose distance from it raises the tolerance.

    Example::

        compare(open_run("one_card"), open_run("tp2_pp2")).verdict
    """
    steps = sorted(set(golden.steps) & set(run.steps))
    steps = steps if step is None else [n for n in steps if n == step]
    result = Comparison(str(golden.path), str(run.path), AGREE, "", steps)
    if not steps:
        return replace(result, verdict=INCOMPARABLE, reason=_no_common_step(golden, run, step))
    pairs = match(golden, run, step)
    different = _different_models(golden, run, pairs)
    if different:
        return replace(result, verdict=INCOMPARABLE, reason=different)
    judgement = _judge(golden, run, pairs, step, noise)
    judgement.diverged |= _lonely_weights(golden, run, pairs)
    order = causal_order(pairs, forward_places(golden))
    states = classify(pairs, judgement.diverged, judgement.layout, order)
    counts = Counter(states)
    result = replace(
        result,
        counts={state: counts.get(state, 0) for state in _STATES},
        layout=dict(Counter(text for text, state in zip(judgement.layout, states, strict=True) if state == "layout")),
        table=_table(pairs, judgement, states, order),
    )
    found = [int(i) for i in order if states[i] in (DIVERGED, INHERITED)]
    if not found:
        return _nothing_differs(result, pairs)
    by_themselves = [i for i in found if states[i] == DIVERGED]
    rest = sorted((i for i in found if states[i] == INHERITED), key=lambda i: -_excess(judgement, i))
    chosen = [*by_themselves, *rest][: SUSPECTS + 1]
    odd = [int(i) for i in order if judgement.replica[i]][:_REPLICAS]
    finder = RankFinder(golden, run, pairs, [*chosen, *odd])
    differences = [_difference(finder, pairs, judgement, states, i) for i in chosen]
    data = [i for i in by_themselves if is_data(pairs)[i] and pairs["path"][i] in ("input_ids", "labels")]
    return replace(
        result,
        verdict=INCOMPARABLE if data else DIVERGED_VERDICT,
        reason=_data_differ(differences[0]) if data else "",
        first_divergence=differences[0],
        suspects=differences[1:],
        replicas=_replicas(finder, pairs, judgement, odd),
        hints=hints(golden, run, pairs, states, by_themselves),
    )


def _judge(golden: Run, run: Run, pairs: Pairs, step: int | None, noise: Run | None) -> Judgement:
    allowed = tolerances(pairs, Scene.of(golden, run, pairs))
    if noise is not None:
        allowed = np.maximum(allowed, _measured(golden, noise, pairs, step))
    padded = [side.facts.get("arguments", {}).get("padded_vocab_size") for side in (golden, run)]
    return judge(pairs, allowed, (padded[0], padded[1]) if all(padded) and padded[0] != padded[1] else None)


_TIMES_NOISE = 4.0


def _measured(golden: Run, noise: Run, pairs: Pairs, step: int | None) -> Floats:
    """Four times the distance between the golden run and its repetition, tensor by tensor."""
    repeated = match(golden, noise, step)
    measured = errors(repeated, scales(repeated))
    by_key = dict(zip(repeated.keys(), measured, strict=True))
    return _TIMES_NOISE * np.array(
        [value if np.isfinite(value := by_key.get(key, 0.0)) else 0.0 for key in pairs.keys()]  # noqa: SIM118
    )


def _no_common_step(golden: Run, run: Run, step: int | None) -> str:
    asked = "no step was recorded by both" if step is None else f"step {step} was not recorded by both"
    return f"{asked}: {golden.path} has {golden.steps or 'none'}, {run.path} has {run.steps or 'none'}"


def _different_models(golden: Run, run: Run, pairs: Pairs) -> str:
    """Why these are not two runs of one model, or an empty text."""
    left, right = (side.facts.get("arguments", {}) for side in (golden, run))
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length", "num_experts"):
        if name in left and name in right and left[name] != right[name]:
            return f"the models differ: {name} is {left[name]} and {right[name]}"
    if left.get("global_batch_size") != right.get("global_batch_size"):
        return (
            f"the batches differ: global_batch_size is {left.get('global_batch_size')}"
            f" and {right.get('global_batch_size')}"
        )
    lonely = _lonely_weights(golden, run, pairs)
    if lonely.any() and "num_layers" not in left:
        name = pairs["name"][np.flatnonzero(lonely)[0]]
        return f"the models differ: {lonely.sum()} weights such as {name} are in one run only"
    if not (pairs["left_has"].astype(bool) & pairs["right_has"].astype(bool)).any():
        return "no tensor of the same name was recorded by both; were different modules selected?"
    return ""


def _lonely_weights(golden: Run, run: Run, pairs: Pairs) -> npt.NDArray[np.bool_]:
    """Weights that only one run has though both recorded all of theirs."""
    if not (_recorded_all(golden) and _recorded_all(run)):
        return np.zeros(len(pairs), bool)
    alone: npt.NDArray[np.bool_] = pairs["left_has"].astype(bool) != pairs["right_has"].astype(bool)
    return alone & (pairs["kind"] == "parameter")


def _recorded_all(run: Run) -> bool:
    """Whether the probe file selected every module of every rank."""
    content = run.facts.get("probe", {}).get("content", {})
    dump = content.get("dump") or {}
    return content.get("ranks", "all") == "all" and not dump.get("list") and dump.get("layers") is None


def _nothing_differs(result: Comparison, pairs: Pairs) -> Comparison:
    if result.counts["agree"]:
        return result
    reasons = ", ".join(result.layout) or "no tensor is in both"
    return replace(result, verdict=INCOMPARABLE, reason=f"nothing could be compared: {reasons}")


def _data_differ(first: Difference) -> str:
    return (
        f"the DATA differ: {first.path} of the model at step {first.step}, microbatch {first.microbatch}"
        f" ({first.what}); give both runs the same samples in the same order"
    )


def _excess(judgement: Judgement, i: int) -> float:
    return float(judgement.error[i] / judgement.tolerance[i])


def _difference(finder: RankFinder, pairs: Pairs, judgement: Judgement, states: Sequence[str], i: int) -> Difference:
    name, whole_step = str(pairs["name"][i]), bool(np.isnan(float(pairs["microbatch"][i])))
    first = int(pairs["block"][i] * pairs["unit"][i])
    return Difference(
        module=culprit(str(pairs["kind"][i]), name, str(pairs["io"][i])),
        name=name,
        io=str(pairs["io"][i]),
        path=str(pairs["path"][i]),
        kind=str(pairs["kind"][i]),
        step=int(pairs["step"][i]),
        microbatch=None if whole_step else int(pairs["microbatch"][i]),
        samples=None if whole_step else (first, first + int(pairs["unit"][i])),
        phase=str(pairs["phase"][i]),
        layer=layer_of(name),
        ranks=finder.ranks(i, replica=bool(judgement.replica[i]), tolerance=float(judgement.tolerance[i])),
        site=finder.site(i),
        error=float(judgement.error[i]),
        tolerance=float(judgement.tolerance[i]),
        state=states[i],
        what=_words(pairs, judgement, i),
    )


def _words(pairs: Pairs, judgement: Judgement, i: int) -> str:
    """The figure that is furthest apart, in words."""
    if pairs["left_has"][i] != pairs["right_has"][i]:
        return f"only the {'golden run' if pairs['left_has'][i] else 'second run'} has it"
    if judgement.replica[i]:
        return "ranks that should hold the same numbers do not"
    bad = [sum(float(np.nan_to_num(pairs[f"{n}_{s}"][i])) for n in ("n_nan", "n_posinf", "n_neginf")) for s in "lr"]
    if bad[0] != bad[1]:
        return f"{bad[0]:.0f} non-finite elements against {bad[1]:.0f}"
    texts = {}
    for name, unit in (("sumsq", 0.5), ("sum", 1.0), ("min", 1.0), ("max", 1.0)):
        left, right = (float(pairs[f"{name}_{side}"][i]) ** unit for side in "lr")
        size = max(abs(left), abs(right), 1e-300)
        texts[abs(left - right) / size] = f"{'norm' if name == 'sumsq' else name} {left:.6g} against {right:.6g}"
    norms = [text for text in texts.values() if text.startswith("norm")]
    return norms[0] if norms and max(texts) < 2 * min(texts) else texts[max(texts)]


def _replicas(finder: RankFinder, pairs: Pairs, judgement: Judgement, odd: Sequence[int]) -> list[dict[str, Any]]:
    """Tensors on which ranks that should hold the same numbers do not, first in order of cause."""
    return [
        {
            "name": str(pairs["name"][i]),
            "io": str(pairs["io"][i]),
            "kind": str(pairs["kind"][i]),
            "step": int(pairs["step"][i]),
            "ranks": finder.ranks(i, replica=True, tolerance=float(judgement.tolerance[i])),
        }
        for i in odd
    ]


_SHOWN = ("step", "microbatch", "phase", "kind", "name", "io", "path", "op")


def _table(pairs: Pairs, judgement: Judgement, states: Sequence[str], order: Any) -> pa.Table:
    """Everything that was compared, as it was judged, in order of cause."""
    columns: dict[str, Any] = {name: pairs[name][order] for name in _SHOWN}
    columns["state"] = np.array(states, object)[order]
    columns["error"], columns["tolerance"] = judgement.error[order], judgement.tolerance[order]
    columns["reason"] = judgement.layout[order]
    for name in (*STATISTICS, "dtype"):
        for side, text in (("l", "golden"), ("r", "run")):
            columns[f"{name}_{text}"] = pairs[f"{name}_{side}"][order]
    return pa.table(columns)
