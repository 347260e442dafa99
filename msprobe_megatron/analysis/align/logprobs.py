"""Log-probs that two runs gave the same tokens: how far apart, which tokens, and what the difference looks like.

Rows of kind `token` (forward-only passes) hold, per rank and position, the log-sum-exp over the rank's part of the
vocabulary and the logit of the next token, or the loss of Megatron with labels. They add up to log-probs here. Samples
are matched by their token ids, so that the batches of the two runs may differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import duckdb
import numpy as np
import numpy.typing as npt

from msprobe_megatron.analysis.align.causes import Cause
from msprobe_megatron.analysis.load.run import Run, RunError
from msprobe_megatron.analysis.load.saved_tensors import TensorFiles

Floats = npt.NDArray[np.float64]
EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_WORST = 10
_SHARE = 0.02
_BINS = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, math.inf)


class Sample(NamedTuple):
    """The tokens of a sample, the log-prob of each after the first, and what the logits were computed in."""

    ids: tuple[int, ...]
    scores: Floats
    dtype: str
    where: str


@dataclass(frozen=True)
class LogProbs:
    """Everything that `msprobe-megatron logprobs A B` shows."""

    left: str
    right: str
    samples: int
    tokens: int
    only_left: int
    only_right: int
    mean: float = 0.0
    median: float = 0.0
    p99: float = 0.0
    largest: float = 0.0
    k1: float = 0.0
    """Mean of log p_A - log p_B over the tokens: an unbiased estimate of the KL divergence, of high variance."""
    k3: float = 0.0
    """Mean of r - 1 - log r with r = p_B / p_A: never negative, of low variance."""
    expected: float = 0.0
    """What the precisions of both sides explain, from the third run if there is one."""
    beyond: float = 0.0
    """Share of tokens beyond it."""
    histogram: list[dict[str, Any]] = field(default_factory=list)
    worst: list[dict[str, Any]] = field(default_factory=list)
    routing: dict[str, Any] = field(default_factory=dict)
    """Of tokens sent to the same experts by both, and of the others: number and mean difference."""
    causes: list[dict[str, str]] = field(default_factory=list)

    @property
    def agree(self) -> bool:
        """Whether rounding explains the difference."""
        return not self.causes

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {**asdict(self), "verdict": "agree" if self.agree else "differ"}


def samples_of(run: Run) -> list[Sample]:
    """All samples of all passes of a run, with their log-probs."""
    connection = duckdb.connect()
    columns = ("step", "microbatch", "rank", "tp", "io", "path", "shape", "tensor", "extra")
    chosen = run.rows(connection).filter("kind = 'token' and tensor is not null")
    rows = [dict(zip(columns, values, strict=True)) for values in chosen.project(", ".join(columns)).fetchall()]
    if not rows:
        raise RunError(f"{run.path}: no tokens; accepted: a run recorded with forward_passes, level L0 or mix")
    files, found = TensorFiles(run), []
    passes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        passes.setdefault((row["step"], row["microbatch"] or 0), []).append(row)
    for (step, microbatch), held in sorted(passes.items()):
        ids = next((_words(files, row) for row in held if row["path"] == "input_ids"), None)
        scored = _scores([(row, _words(files, row)) for row in held if row["io"] == "output"])
        if ids is None or scored is None:
            continue
        scores, dtype = scored
        ids, scores = np.atleast_2d(ids), np.atleast_2d(scores)
        for number, (tokens, values) in enumerate(zip(ids, scores, strict=True)):
            where = f"step {step}, microbatch {microbatch}, sample {number}"
            found.append(Sample(tuple(int(n) for n in tokens), values[: len(tokens) - 1], dtype, where))
    return found


def _words(files: TensorFiles, row: Mapping[str, Any]) -> npt.NDArray[Any]:
    return files.view(row["step"], row["rank"], row["tensor"], tuple(row["shape"])).words


def _scores(held: list[tuple[dict[str, Any], npt.NDArray[Any]]]) -> tuple[Floats, str] | None:
    """Log-probs from the parts of the vocabulary on all ranks, and the dtype of the logits."""
    if not held:
        return None
    dtype = str(json.loads(held[0][0]["extra"] or "{}").get("logits", "float32"))
    paths = {row["path"] for row, _ in held}
    if "loss" in paths:
        return -held[0][1].astype(np.float64), dtype
    parts = {row["tp"]: words.astype(np.float64) for row, words in held} if "split" in paths else {0: held[0][1]}
    with np.errstate(invalid="ignore"):  # the last position has no next token
        sums = np.logaddexp.reduce([part[..., 0].astype(np.float64) for part in parts.values()], 0)
    token = np.max([part[..., 1].astype(np.float64) for part in parts.values()], 0)
    return token - sums, dtype


def logprobs(left: Run, right: Run, reference: Run | None = None) -> LogProbs:
    """Compare the log-probs of two runs; `reference` is a third one, of higher precision than both."""
    a, b = ({sample.ids: sample for sample in samples_of(run)} for run in (left, right))
    common = [ids for ids in a if ids in b]
    result = LogProbs(str(left.path), str(right.path), len(common), 0, len(a) - len(common), len(b) - len(common))
    if not common:
        return _none_in_common(result, list(a.values()), list(b.values()))
    x = np.concatenate([a[ids].scores for ids in common])
    y = np.concatenate([b[ids].scores for ids in common])
    apart = x - y
    size = np.abs(apart)
    third = {s.ids: s for s in samples_of(reference)} if reference is not None else {}
    expected = _expected(a, b, common, third)
    beyond = float((size > expected).mean())
    ratio = np.exp(np.clip(-apart, -50, 50))
    places = [(ids, at) for ids in common for at in range(len(a[ids].scores))]
    worst = [
        {
            "where": a[places[i][0]].where,
            "position": places[i][1] + 1,
            "token": places[i][0][places[i][1] + 1],
            "left": float(x[i]),
            "right": float(y[i]),
            "difference": float(apart[i]),
        }
        for i in np.argsort(-size)[:_WORST].tolist()
    ]
    counts, _ = np.histogram(size, _BINS)
    moved = routed_otherwise(left, right, common, a, b)
    found = LogProbs(
        **{name: getattr(result, name) for name in ("left", "right", "samples", "only_left", "only_right")},
        tokens=len(x),
        mean=float(size.mean()),
        median=float(np.median(size)),
        p99=float(np.quantile(size, 0.99)),
        largest=float(size.max()),
        k1=float(apart.mean()),
        k3=float((ratio - 1 + apart).mean()),
        expected=expected,
        beyond=beyond,
        histogram=[{"from": low, "tokens": int(n)} for low, n in zip(_BINS, counts, strict=False)],
        worst=worst,
        routing=_split(moved, size),
        causes=[],
    )
    causes = _causes(found, a, b, common, moved, size) if beyond > _SHARE else []
    return LogProbs(**{**vars(found), "causes": [cause.as_dict() for cause in causes]})


def _expected(
    a: Mapping[Any, Sample], b: Mapping[Any, Sample], common: list[Any], third: Mapping[Any, Sample]
) -> float:
    """Three times the distance of the golden side from the reference; else what the coarser logits explain."""
    both = [ids for ids in common if ids in third]
    if both:
        distance = np.concatenate([np.abs(a[ids].scores - third[ids].scores) for ids in both])
        return 3 * float(np.quantile(distance, 0.99))
    # Of two precisions the finer one counts: that the other side's logits are coarse is a finding.
    return _rounding(min(EPS.get(side[common[0]].dtype, 2.0**-23) for side in (a, b)), a, common)


def _rounding(eps: float, a: Mapping[Any, Sample], common: list[Any]) -> float:
    """A few units in the last place of the logits, which are of the size of the scores."""
    size = float(np.quantile(np.abs(np.concatenate([a[ids].scores for ids in common])), 0.9))
    return 8 * eps * max(size, 1.0)


def _none_in_common(result: LogProbs, left: list[Sample], right: list[Sample]) -> LogProbs:
    """Samples that are nearly the same: another chat template, another token at the beginning."""
    best: tuple[int, Sample, Sample] | None = None
    for a in left[:64]:
        for b in right[:64]:
            shared = _overlap(a.ids, b.ids)
            if best is None or shared > best[0]:
                best = (shared, a, b)
    if best is None or 2 * best[0] < max(len(best[1].ids), len(best[2].ids)):
        cause = Cause("other-samples", "no sample of one run is in the other", "tokens")
    else:
        _, a, b = best
        at = next(
            (i for i, (m, n) in enumerate(zip(a.ids, b.ids, strict=False)) if m != n), min(len(a.ids), len(b.ids))
        )
        pair = [ids[at] if at < len(ids) else "nothing" for ids in (a.ids, b.ids)]
        text = f"the tokens differ from position {at} on: {pair[0]} against {pair[1]} (template, truncation)"
        cause = Cause("other-tokens", text, "tokens")
    return LogProbs(**{**vars(result), "causes": [cause.as_dict()]})


def _overlap(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Tokens that two samples share at their beginning and at their end."""
    most = min(len(a), len(b))
    head = next((i for i in range(most) if a[i] != b[i]), most)
    tail = next((i for i in range(most - head) if a[-1 - i] != b[-1 - i]), most - head)
    return head + tail


def routed_otherwise(
    left: Run, right: Run, common: list[Any], a: Mapping[Any, Sample], b: Mapping[Any, Sample]
) -> npt.NDArray[np.bool_] | None:
    """For every token whether any router sent its position to other experts; None if routing was not recorded."""
    codes = [_chosen(run) for run in (left, right)]
    if not all(codes):
        return None
    moved = []
    for ids in common:
        one, two = codes[0].get(a[ids].where), codes[1].get(b[ids].where)
        if one is None or two is None or one.shape != two.shape:
            return None
        moved.append((one != two).any(0)[: len(ids) - 1])
    return np.concatenate(moved)


def _chosen(run: Run) -> dict[str, npt.NDArray[np.int64]]:
    """By sample: codes of the chosen experts, a row for every router and a column for every position."""
    connection = duckdb.connect()
    columns = ("step", "microbatch", "rank", "name", "shape", "tensor")
    chosen = (
        run.rows(connection).filter("kind = 'routing' and tensor is not null and tp = 0 and cp = 0").order("name, rank")
    )
    files = TensorFiles(run)
    found: dict[str, dict[str, npt.NDArray[np.int64]]] = {}
    for values in chosen.project(", ".join(columns)).fetchall():
        row = dict(zip(columns, values, strict=True))
        words = _words(files, row)
        if words.ndim != 3:
            return {}
        for number in range(words.shape[1]):
            where = f"step {row['step']}, microbatch {row['microbatch'] or 0}, sample {number}"
            found.setdefault(where, {}).setdefault(row["name"], (words[:, number, 0] >> 1).astype(np.int64))
    return {where: np.stack(list(rows.values())) for where, rows in found.items()}


def _split(moved: npt.NDArray[np.bool_] | None, size: Floats) -> dict[str, Any]:
    if moved is None:
        return {}
    return {
        name: {"tokens": int(part.sum()), "mean": float(size[part].mean()) if part.any() else 0.0}
        for name, part in (("same_experts", ~moved), ("other_experts", moved))
    }


def _causes(
    found: LogProbs,
    a: Mapping[Any, Sample],
    b: Mapping[Any, Sample],
    common: list[Any],
    moved: npt.NDArray[np.bool_] | None,
    size: Floats,
) -> list[Cause]:
    """What the pattern of differences says; where it begins is the question of `compare`."""
    kinds = a[common[0]].dtype, b[common[0]].dtype
    beyond = size > found.expected
    coarse = max(EPS.get(kind, 2.0**-23) for kind in kinds)
    if kinds[0] != kinds[1] and found.p99 <= _rounding(coarse, a, common):
        return [Cause("logits-precision", f"logits in {kinds[0]} against {kinds[1]}", "logits")]
    if moved is not None and moved.any() and beyond[moved].mean() > 2 * beyond[~moved].mean():
        text = f"tokens routed to other experts are {found.routing['other_experts']['mean']:.2g} apart, the others"
        return [Cause("other-experts", f"{text} {found.routing['same_experts']['mean']:.2g}", "router")]
    command = f"msprobe-megatron compare {found.left} {found.right}"
    text = f"{100 * found.beyond:.0f} % of the tokens are further apart than rounding explains ({found.expected:.2g})"
    return [Cause("log-probs", text, "logits", command)]
