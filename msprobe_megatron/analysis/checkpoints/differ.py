"""Two checkpoints side by side: per tensor cosine, relative error and digest, and what only one of them has."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from msprobe_megatron.analyse.elements import Apart, View, add_views
from msprobe_megatron.checkpoints.canonical import cut_of
from msprobe_megatron.checkpoints.held import PARAMETER, Checkpoint, Held, reading
from msprobe_megatron.measure.numbered import numbered_into

EQUAL, DIFFERS, ONLY_LEFT, ONLY_RIGHT, LAYOUT = "equal", "differs", "only_left", "only_right", "layout"
_WORDS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class TensorDiff:
    """One tensor of two checkpoints. Digests are those of `dump: {digest: true}`, of the whole tensor."""

    kind: str
    name: str
    state: str
    relative: float | None = None
    cosine: float | None = None
    max_abs: float | None = None
    differing: int | None = None
    numel: int | None = None
    digests: tuple[str, str] | None = None
    reason: str = ""


@dataclass(frozen=True)
class CheckpointDiff:
    """Everything that `msprobe-megatron ckpt-diff` shows; tensors that differ most come first."""

    left: str
    right: str
    forms: tuple[str, str]
    iterations: tuple[int | None, int | None]
    counts: dict[str, int]
    tensors: list[TensorDiff]
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `--json`; the relative error is null where non-finite elements differ."""
        plain = asdict(self)
        for item in plain["tensors"]:
            if item["relative"] is not None and not math.isfinite(item["relative"]):
                item["relative"] = None
        return plain


def diff(
    left: Checkpoint, right: Checkpoint, tolerance: float = 0.0, progress: Callable[[int, int], None] | None = None
) -> CheckpointDiff:
    """Compare all tensors of two checkpoints; those within `tolerance` (relative) count as equal.

    Example::

        diff(open_checkpoint("tp1"), open_checkpoint("tp8")).counts
    """
    found = []
    keys = sorted({*left.tensors, *right.tensors})
    for count, key in enumerate(keys):
        if progress is not None and count % 16 == 0:
            progress(count, len(keys))
        a, b = left.tensors.get(key), right.tensors.get(key)
        if a is None or b is None:
            found.append(TensorDiff(*key, ONLY_LEFT if b is None else ONLY_RIGHT))
        else:
            found.append(_one(*key, a, b, tolerance))
    order = (DIFFERS, LAYOUT, ONLY_LEFT, ONLY_RIGHT, EQUAL)
    found.sort(key=lambda item: (order.index(item.state), -(item.relative or 0.0)))
    counts = Counter(item.state for item in found)
    problems = [f"{side.path}: {text}" for side in (left, right) for text in (*side.problems, *_masters(side))]
    return CheckpointDiff(
        str(left.path),
        str(right.path),
        (left.form, right.form),
        (left.iteration, right.iteration),
        {state: counts.get(state, 0) for state in order},
        found,
        problems,
    )


def _one(kind: str, name: str, a: Held, b: Held, tolerance: float) -> TensorDiff:
    reason = a.reason or b.reason
    padded = _vocabulary(name, a.shape, b.shape)
    if not reason and a.shape != b.shape and padded is None:
        reason = f"shape {a.shape} against {b.shape}"
    if reason:
        return TensorDiff(kind, name, LAYOUT, reason=reason)
    with reading(f"{kind} {name}"):
        x, y = a.load(), b.load()
    if padded is not None:
        x, y = x[:padded], y[:padded]
    apart = Apart()
    add_views(apart, _view(x), _view(y), (0,) * x.dim())
    digests = _digest(x), _digest(y)
    same = apart.relative <= tolerance and (tolerance > 0 or apart.differing + apart.unlike == 0)
    return TensorDiff(
        kind,
        name,
        EQUAL if same else DIFFERS,
        apart.relative,
        apart.cosine,
        apart.largest,
        apart.differing + apart.unlike,
        apart.numel,
        digests,
        f"vocabulary padded to {a.shape[0]} and to {b.shape[0]}: the first {padded} rows" if padded else "",
    )


def _masters(side: Checkpoint) -> list[str]:
    """Master weights of the optimizer that, rounded, are not the weights: one of them was saved wrong."""
    wrong = []
    for kind, name in side.tensors:
        master, weight = side.tensors[kind, name], side.tensors.get((PARAMETER, name))
        if kind != "master" or weight is None or master.reason or weight.reason or master.shape != weight.shape:
            continue
        with reading(f"{kind} {name}"):
            rounded = weight.load()
            same = torch.equal(master.load().to(rounded.dtype), rounded)
        if not same:
            wrong.append(name)
    some = f"{wrong[0]}{f' and {len(wrong) - 1} more' if len(wrong) > 1 else ''}" if wrong else ""
    return [f"the optimizer's master weights are not the weights: {some}"] if wrong else []


def _vocabulary(name: str, a: tuple[int, ...], b: tuple[int, ...]) -> int | None:
    """Rows that two vocabularies have in common, where they were padded differently."""
    words = "word_embeddings" in name or "output_layer" in name
    if words and cut_of(name, gated=False) and len(a) == len(b) and a[1:] == b[1:] and a != b:
        return min(a[0], b[0])
    return None


def _view(x: torch.Tensor) -> View:
    x = x.detach().contiguous()
    if x.dtype is torch.bfloat16:
        return View("BF16", x.view(torch.int16).numpy().view("<u2"))
    if x.dtype not in _WORDS:
        x = x.double()
    return View(_WORDS[x.dtype], x.numpy())


def _digest(x: torch.Tensor) -> str:
    word = torch.zeros(1, dtype=torch.int64)
    numbered_into(x.detach(), None, word, torch.zeros(0))
    return f"{int(word.item()) & (1 << 64) - 1:016x}"
