"""Two checkpoints side by side: per tensor cosine, relative error and digest, and what only one of them has."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from msprobe_megatron.analysis.align.causes import causes_of_weights
from msprobe_megatron.analysis.align.translate import sizes_of
from msprobe_megatron.analysis.checkpoints.canonical import cut_of
from msprobe_megatron.analysis.checkpoints.held import PARAMETER, Checkpoint, CheckpointTensor, Key, reading
from msprobe_megatron.analysis.checkpoints.mapped import CheckpointWeights, map_for, mapped
from msprobe_megatron.analysis.compare.pairs.elements import Apart, View, add_views
from msprobe_megatron.run_directory.plain_digest import digest_of

EQUAL, DIFFERS, ONLY_LEFT, ONLY_RIGHT, LAYOUT = "equal", "differs", "only_left", "only_right", "layout"
_WORDS = {"torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16"}


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
    causes: list[dict[str, str]] = field(default_factory=list)
    """Between Megatron and Hugging Face: usual faults of a conversion, each with a stable id."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `--json`; the relative error is null where non-finite elements differ."""
        plain = asdict(self)
        for item in plain["tensors"]:
            if item["relative"] is not None and not math.isfinite(item["relative"]):
                item["relative"] = None
        return plain


def diff(
    left: Checkpoint,
    right: Checkpoint,
    tolerance: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
    names: str | None = None,
) -> CheckpointDiff:
    """Compare all tensors of two checkpoints; those within `tolerance` (relative) count as equal.

    Of Megatron and Hugging Face, the latter is brought to Megatron's names by the map `names`, and only weights are
    compared.
    """
    foreign = [side.form == "safetensors" for side in (left, right)]
    if foreign[0] != foreign[1]:
        return _between(left, right, tolerance, progress, names)
    return _diff(left, right, tolerance, progress)


def _between(
    left: Checkpoint,
    right: Checkpoint,
    tolerance: float,
    progress: Callable[[int, int], None] | None,
    names: str | None,
) -> CheckpointDiff:
    """Megatron against Hugging Face: their weights, and why they differ."""
    theirs = left if left.form == "safetensors" else right
    sides = [
        mapped(side, map_for(side, names)) if side is theirs else replace(side, tensors=_weights(side.tensors))
        for side in (left, right)
    ]
    found = _diff(sides[0], sides[1], tolerance, progress)
    differing = [item.name for item in found.tensors if item.state == DIFFERS]
    lonely = {item.name: "golden" for item in found.tensors if item.state == ONLY_LEFT}
    lonely |= {item.name: "run" for item in found.tensors if item.state == ONLY_RIGHT}
    if not differing and not lonely:
        return found
    weights = CheckpointWeights(sides[0], sides[1], as_view)
    causes = causes_of_weights(weights, sorted(differing), lonely, sizes_of(theirs.settings))
    return replace(found, causes=[cause.as_dict() for cause in causes])


def _weights(tensors: dict[Key, CheckpointTensor]) -> dict[Key, CheckpointTensor]:
    """Weights and buffers of the model, without what TransformerEngine keeps beside them."""
    return {key: entry for key, entry in tensors.items() if key[0] == PARAMETER and not key[1].endswith("_extra_state")}


def _diff(
    left: Checkpoint, right: Checkpoint, tolerance: float, progress: Callable[[int, int], None] | None
) -> CheckpointDiff:
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


def _one(kind: str, name: str, a: CheckpointTensor, b: CheckpointTensor, tolerance: float) -> TensorDiff:
    reason = a.reason or b.reason
    padded = _vocabulary(name, a.shape, b.shape)
    if not reason and a.shape != b.shape and padded is None:
        reason = f"shape {a.shape} vs {b.shape}"
    if reason:
        return TensorDiff(kind, name, LAYOUT, reason=reason)
    with reading(f"{kind} {name}"):
        x, y = a.load(), b.load()
    x, y = as_view(x), as_view(y)
    if padded is not None:
        x, y = View(x.dtype, x.words[:padded]), View(y.dtype, y.words[:padded])
    apart = Apart()
    add_views(apart, x, y, (0,) * x.words.ndim)
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
        f"vocabulary padded to {a.shape[0]} and {b.shape[0]}: compared the first {padded} rows" if padded else "",
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
            same = bool((master.load().to(rounded.dtype) == rounded).all())
        if not same:
            wrong.append(name)
    some = f"{wrong[0]}{f' and {len(wrong) - 1} more' if len(wrong) > 1 else ''}" if wrong else ""
    return [f"the optimizer's master weights differ from the weights: {some}"] if wrong else []


def _vocabulary(name: str, a: tuple[int, ...], b: tuple[int, ...]) -> int | None:
    """Rows that two vocabularies have in common, where they were padded differently."""
    words = "word_embeddings" in name or "output_layer" in name
    if words and cut_of(name, gated=False) and len(a) == len(b) and a[1:] == b[1:] and a != b:
        return min(a[0], b[0])
    return None


def as_view(x: Any) -> View:
    """The elements of a tensor of torch as words; a view stays as it is."""
    if isinstance(x, View):
        return x
    x = x.detach().contiguous()
    kind = str(x.dtype)
    if kind == "torch.bfloat16":
        import torch

        return View("BF16", x.view(torch.int16).numpy().view("<u2"))
    if kind not in _WORDS:
        x, kind = x.double(), "torch.float64"
    return View(_WORDS[kind], x.numpy())


def _digest(x: Any) -> str:
    return f"{digest_of(as_view(x).words):016x}"
