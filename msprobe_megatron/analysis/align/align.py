"""Two runs of which at least one is not Megatron's: brought to one form, compared, and the difference explained.

The order of the answer is that of the question: do the weights agree, then the embeddings, then layer by layer; and if
not, which fault of a conversion looks like that.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_megatron.analysis.align.causes import Cause, Weights, causes_of_settings, causes_of_weights
from msprobe_megatron.analysis.align.logprobs import LogProbs
from msprobe_megatron.analysis.align.name_map import NameMap, load_map, map_of
from msprobe_megatron.analysis.align.observed import causes_of_angles, causes_of_tensors, first_position
from msprobe_megatron.analysis.align.tensors import StepTensors
from msprobe_megatron.analysis.align.translate import sizes_of, translated
from msprobe_megatron.analysis.compare.compare import Comparison, compare
from msprobe_megatron.analysis.load.run import Run, RunError


@dataclass(frozen=True)
class Aligned:
    """Two runs in one form, and the map by which."""

    golden: Run
    run: Run
    names: NameMap
    steps: dict[int, int]


def foreign_map(run: Run, name: str | None = None) -> NameMap | None:
    """The map of a run that is not Megatron's; None for Megatron's own. `name` is what the user asked for."""
    kind = str(run.facts.get("effective", {}).get("class", ""))
    found = map_of(kind)
    if found is None and kind and not _is_megatron(run) and name is None:
        raise RunError(f"{run.path}: no map for {kind}; accepted: --map with a name of the kit or a YAML file")
    return None if _is_megatron(run) else load_map(name) if name is not None else found


def _is_megatron(run: Run) -> bool:
    settings = run.facts.get("effective", {}).get("model", {})
    return not run.facts.get("effective") or "tensor_model_parallel_size" in settings


@contextmanager
def aligned(golden: Run, run: Run, name: str | None = None) -> Iterator[Aligned | None]:
    """Both runs in Megatron's form, in a directory that is removed afterwards; None if both have it already."""
    maps = [foreign_map(side, name) for side in (golden, run)]
    known = next((found for found in maps if found is not None), None)
    if known is None:
        yield None
        return
    steps = matching_steps(golden, run)
    if not steps:
        raise RunError(f"{golden.path} and {run.path}: no pass of one was given the tokens of a pass of the other")
    with tempfile.TemporaryDirectory(prefix="msprobe_align_") as folder:
        sides = []
        for index, (side, names) in enumerate(zip((golden, run), maps, strict=True)):
            numbers = {left: left for left in steps} if index == 0 else {right: left for left, right in steps.items()}
            other = (run, golden)[index]
            if names is not None:
                sides.append(translated(side, names, Path(folder) / str(index), numbers, other, steps))
            elif all(a == b for a, b in numbers.items()):
                sides.append(side)
            else:
                raise RunError(
                    f"{golden.path} and {run.path}: equal tokens at steps of other numbers ({steps}); record with"
                    " attach(…, step=N) so that they have one number"
                )
        yield Aligned(sides[0], sides[1], known, steps)


def matching_steps(golden: Run, run: Run) -> dict[int, int]:
    """Steps of the golden run and the steps of the run that were given the same tokens."""
    tokens: dict[Any, list[int]] = {}
    for step in run.steps:
        tokens.setdefault(_tokens(run, step), []).append(step)
    found: dict[int, int] = {}
    for step in golden.steps:
        candidates = tokens.get(_tokens(golden, step), [])
        chosen = step if step in candidates else next((n for n in candidates if n not in found.values()), None)
        if chosen is not None:
            found[step] = chosen
    return found or {step: step for step in golden.steps if step in run.steps}


def _tokens(run: Run, step: int) -> Any:
    """The token ids of a step: its own bytes, or their digest; None if neither was recorded."""
    tensors = StepTensors.of(run, step)
    for kind in ("token", "activation"):
        key = (kind, "model", "input", "input_ids")
        rows = tensors.rows.get(key)
        if rows and rows[0]["tensor"] is not None:
            words = tensors.files.view(step, rows[0]["rank"], rows[0]["tensor"], tuple(rows[0]["shape"])).words
            return words.shape, words.astype(np.int64).tobytes()
    rows = tensors.rows.get(("activation", "model", "input", "input_ids"))
    return (tuple(rows[0]["shape"]), rows[0]["digest"]) if rows else None


def compare_aligned(
    golden: Run, run: Run, name: str | None = None, step: int | None = None, noise: Run | None = None, **options: Any
) -> Comparison:
    """Compare two runs of any two implementations; of two runs of Megatron this is `compare`."""
    with aligned(golden, run, name) as found:
        if found is None:
            return compare(golden, run, step, noise, **options)
        result = compare(found.golden, found.run, step, None, **options)
        result = replace(result, golden=str(golden.path), run=str(run.path))
        return explained(result, found, golden, run)


def explained(result: Comparison, found: Aligned, golden: Run, run: Run) -> Comparison:
    """The result with what it says of the weights, and with causes."""
    table = result.table
    if table is None or not result.steps:
        return result
    rows = table.select(["step", "kind", "name", "io", "path", "state"]).to_pylist()
    weights = [row for row in rows if row["kind"] == "parameter" and row["step"] == result.steps[0]]
    differing = [row["name"] for row in weights if row["state"] in ("diverged", "inherited")]
    sides = StepTensors.of(found.golden, result.steps[0]), StepTensors.of(found.run, result.steps[0])
    held = [{name for kind, name, _, path in side.rows if kind == "parameter" and path == ""} for side in sides]
    lonely = dict.fromkeys(sorted(held[0] - held[1]), "golden") | dict.fromkeys(sorted(held[1] - held[0]), "run")
    agreeing = sum(row["state"] == "agree" for row in weights)
    settings = [side.facts.get("effective", {}).get("model", {}) for side in (golden, run)]
    sizes = sizes_of(settings[0])
    causes: list[Cause] = []
    if differing or lonely:
        changed = [name for name in differing if name not in lonely]
        causes += causes_of_weights(Weights(*sides), changed, lonely, sizes)
    differing = [name for name in differing if name not in lonely]
    said = _said_of_weights(agreeing, differing, lonely)
    first = result.first_divergence
    if first is not None and first.kind == "activation" and not differing:
        places = [first.name, *(item.name for item in result.suspects)]
        at = first_position(*sides, first.name, first.io, first.path, max(first.tolerance, 1e-6))
        where = f"{first.name} {first.io} differs" + ("" if at is None else f" from position {at} on")
        said = f"{said}; {where}"
        found_settings = causes_of_settings(found.names.settings, settings[0], settings[1], places)
        seen = causes_of_tensors(*sides, first.name, first.io, first.path)
        if "self_attention" in first.name:
            seen += _rotary(golden, run, result.steps[0], found)
        causes += [*(c for c in found_settings if c.at), *seen, *(c for c in found_settings if not c.at)]
    command = f"msprobe-megatron compare {golden.path} {run.path} --json"
    told = [replace(cause, next=cause.next or command) for cause in causes]
    return replace(result, causes=[cause.as_dict() for cause in told], hints=[said, *result.hints])


def _rotary(golden: Run, run: Run, step: int, found: Aligned) -> list[Cause]:
    """The rotary angles of the side that is not Megatron's against those of the side that is."""
    if found.run is run:
        return causes_of_angles(StepTensors.of(golden, step), StepTensors.of(run, step))
    return causes_of_angles(StepTensors.of(run, found.steps[step]), StepTensors.of(golden, step))


def _said_of_weights(agreeing: int, differing: list[str], lonely: dict[str, str]) -> str:
    if not agreeing and not differing:
        return "no weight of one side was recorded by the other"
    if not differing and not lonely:
        return f"weights equal: all {agreeing}"
    parts = (
        [f"{len(differing)} of {agreeing + len(differing)} weights differ"]
        if differing
        else [f"{agreeing} weights equal"]
    )
    if lonely:
        parts.append(f"{len(lonely)} on one side only")
    return ", ".join(parts)


def with_causes_of_weights(result: LogProbs, left: Run, right: Run) -> LogProbs:
    """The result with the cause in front, where the weights of the two runs were recorded and differ."""
    if result.agree or not result.samples:
        return result
    compared = compare_aligned(left, right, tensors=True)
    about = [cause for cause in compared.causes if not cause["id"].startswith("setting:")]
    first = compared.first_divergence
    if first is not None and first.kind == "parameter":
        more = about or [Cause("weights", f"the weights differ: {first.name}", first.name).as_dict()]
        return replace(result, causes=[*more, *result.causes])
    if first is not None and compared.verdict == "diverged" and result.causes[0]["id"] == "log-probs":
        text = f"weights equal; the first tensor to differ is {first.name} {first.io}"
        return replace(
            result, causes=[*compared.causes, Cause("arithmetic", text, first.name).as_dict(), *result.causes]
        )
    return result
