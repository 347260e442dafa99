"""A causal language model of Hugging Face run on given tokens, recorded as a run: the golden side of `compare`.

transformers is optional (`pip install msprobe_megatron[hf]`) and imported only here, when a model is recorded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msprobe_megatron
from msprobe_megatron.config import ConfigError, from_document

_LARGEST = 256 << 20


def read_tokens(path: str | Path) -> list[list[int]]:
    """Samples of token ids from JSON: a list of lists, or an object with `input_ids`; raises `ConfigError`."""
    accepted = '[[1, 2, 3], …] or {"input_ids": [[1, 2, 3], …]}'
    file = Path(path)
    try:
        if file.stat().st_size > _LARGEST:
            raise ConfigError(f"{file}: {file.stat().st_size} bytes; accepted: at most {_LARGEST}")
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read: {str(error)[:120]}; accepted: {accepted}") from error
    samples = content.get("input_ids") if isinstance(content, dict) else content
    if isinstance(samples, list) and samples and all(_is_id(item) for item in samples):
        samples = [samples]
    if not isinstance(samples, list) or not samples or not all(_is_sample(sample) for sample in samples):
        raise ConfigError(f"{file}: holds no samples of token ids; accepted: {accepted}")
    return samples


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_sample(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(_is_id(item) for item in value)


def batches(samples: Sequence[list[int]], size: int) -> list[list[list[int]]]:
    """Neighbours of one length in batches of at most `size`, in order: nothing is padded.

    Example::

        >>> batches([[1, 2], [3, 4], [5]], 4)
        [[[1, 2], [3, 4]], [[5]]]
    """
    found: list[list[list[int]]] = []
    for sample in samples:
        if found and len(found[-1]) < size and len(found[-1][0]) == len(sample):
            found[-1].append(sample)
        else:
            found.append([sample])
    return found


def record(
    model_dir: str, data: str | Path, out: str | Path, *, dtype: str, device: str, batch: int, tensors: bool
) -> dict[str, Any]:
    """Load the model, run the tokens of `data` through it, and write the run `out`; returns what was recorded."""
    samples = read_tokens(data)
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(
            f"record-hf needs torch and transformers ({error}): pip install msprobe_megatron[hf]"
        ) from error
    chosen = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    kind = dtype if dtype == "auto" else getattr(torch, dtype)
    # Only files of the directory: nothing is downloaded, and no code of the model's own is run.
    try:
        model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=kind, local_files_only=True, trust_remote_code=False, attn_implementation="eager"
        )
    except (OSError, ValueError, KeyError) as error:
        problem = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{model_dir}: cannot be loaded: {problem}; accepted: a directory with config.json"
        ) from error
    model = model.to(chosen).eval()
    most = max(max(sample) for sample in samples)
    size = model.get_input_embeddings().num_embeddings
    if most >= size:
        raise ConfigError(f"{data}: token id {most}; accepted: ids below {size}, the vocabulary of {model_dir}")
    section = {"task": "tensor" if tensors else "statistics", "digest": True, "stacks": False}
    config = from_document({"output": str(out), "forward_passes": "call", "dump": section}, "record-hf")
    passes = batches(samples, batch)
    with torch.no_grad(), msprobe_megatron.attach(model, config=config) as session:
        for ids in passes:
            model(input_ids=torch.tensor(ids, device=chosen), use_cache=False)
    return {"run": str(out), "class": type(model).__name__, "steps": session.steps_recorded, "faults": session.faults}
