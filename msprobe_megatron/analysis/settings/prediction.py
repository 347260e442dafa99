"""How many rows a probe file makes of a job, and what they cost, from its launch script alone.

The counts are those of megatron.core's GPT: rows for each microbatch, layer, local expert and weight, measured on the
demo job. They are a guide before the first launch, right to about a factor of two; the job says what its first step
really took.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msprobe_megatron.config import ProbeConfig

# Rows of one microbatch: (outside of layers, a layer, a local expert that is a module of its own).
_MODULES = (34, 57, 14)
_CALLS = (80, 255, 40)
# Weights outside of layers, of a layer, of an expert.
_WEIGHTS = (2, 10, 2)
# Bytes of a row in a file of one step, of many steps, and of a file without rows.
_DUMP_BYTES, _MONITOR_BYTES, _FILE_BYTES = 64, 36, 8000
# Host time of a row, as BENCHMARKS.md has it.
_SECONDS = 15e-6


@dataclass(frozen=True)
class Shape:
    """What of a job decides how many rows there are, on one rank; `assumed` says what its launch script left open."""

    layers: int
    microbatches: int
    experts: int
    world: int
    iterations: int | None
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prediction:
    """Of one feature: rows and bytes of a recorded step on one rank, how many steps, the ranks that record."""

    feature: str
    rows: int
    bytes_per_step: int
    steps: int | None
    ranks: int

    @property
    def seconds(self) -> float:
        """Host time that the rows of a recorded step take."""
        return self.rows * _SECONDS

    @property
    def bytes(self) -> int | None:
        """Bytes of all steps and ranks; None if the number of steps is not known."""
        return None if self.steps is None else self.bytes_per_step * self.steps * self.ranks

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "seconds_per_step": self.seconds, "bytes": self.bytes}


def _number(arguments: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
    value = arguments.get(name)
    if isinstance(value, list):
        # Of a launcher's last option: the script stands behind its value.
        value = value[0]
    return int(value) if isinstance(value, str) and value.isdecimal() and int(value) else default


def shape_of(arguments: Mapping[str, Any]) -> Shape:
    """The shape of a job from the flags of its launch script, underscores for hyphens."""
    assumed = []
    sizes = {}
    for name, default in (("num_layers", 32), ("micro_batch_size", 1), ("nproc_per_node", 8), ("nnodes", 1)):
        found = _number(arguments, name)
        if found is None:
            assumed.append(f"--{name.replace('_', '-')} {default}")
        sizes[name] = found or default
    tensor, pipeline, context = (
        _number(arguments, f"{kind}_parallel_size", 1) or 1 for kind in ("tensor_model", "pipeline_model", "context")
    )
    world = sizes["nproc_per_node"] * sizes["nnodes"]
    data = max(1, world // (tensor * pipeline * context))
    batch = _number(arguments, "global_batch_size", sizes["micro_batch_size"] * data) or 1
    experts = _number(arguments, "num_experts", 0) or 0
    parts = _number(arguments, "expert_model_parallel_size", 1) or 1
    # Experts of a grouped GEMM are one module.
    local = 0 if arguments.get("moe_grouped_gemm") else experts // parts
    return Shape(
        layers=max(1, -(-sizes["num_layers"] // pipeline)),
        microbatches=max(1, batch // (sizes["micro_batch_size"] * data)),
        experts=local,
        world=world,
        iterations=_number(arguments, "train_iters"),
        assumed=tuple(assumed),
    )


def predict(config: ProbeConfig, shape: Shape) -> list[Prediction]:
    """What each feature of a probe file that writes at given steps is going to write."""
    found = []
    if config.dump is not None:
        table = _MODULES if config.dump.level in ("L0", "debug") else _CALLS
        rows = shape.microbatches * _per_microbatch(table, shape) + 2 * _weights(shape)
        steps = _steps(config, shape)
        found.append(Prediction("dump", rows, _FILE_BYTES + rows * _DUMP_BYTES, steps, shape.world))
    if config.recorder is not None:
        rows = shape.microbatches * _per_microbatch(_MODULES, shape) + 2 * _weights(shape)
        steps = config.recorder.keep_steps
        found.append(Prediction("recorder", rows, _FILE_BYTES + rows * _DUMP_BYTES, steps, shape.world))
    if config.monitor is not None:
        monitor = config.monitor
        repeats = shape.microbatches if monitor.microbatches == "each" else 1
        sides = 1.0 if monitor.direction == "both" else 0.5
        rows = round(repeats * sides * _per_microbatch(_MODULES, shape)) * monitor.activations
        if monitor.targets and monitor.activations:
            # Two tensors and their gradients of each; a name without a dot is that of a module in every layer.
            chosen = sum(1 if "." in target.name else shape.layers for target in monitor.targets)
            rows = 4 * repeats * chosen
        rows += _weights(shape) * (monitor.gradients + 2 * monitor.optimizer + 3 * monitor.update) + 8
        rows += shape.microbatches * (2 + 6 * monitor.data)
        steps = None if shape.iterations is None else max(1, (shape.iterations - monitor.start_step) // monitor.every)
        found.append(Prediction("monitor", rows, rows * _MONITOR_BYTES, steps, shape.world))
    return found


def _per_microbatch(table: tuple[int, int, int], shape: Shape) -> int:
    outside, layer, expert = table
    return outside + shape.layers * (layer + expert * shape.experts)


def _weights(shape: Shape) -> int:
    return _per_microbatch(_WEIGHTS, shape)


def _steps(config: ProbeConfig, shape: Shape) -> int | None:
    """Steps that the file requests, as far as the job has them."""
    count = 0
    for span in config.steps.spans:
        ends = [
            end for end in (span.last, None if shape.iterations is None else shape.iterations - 1) if end is not None
        ]
        if not ends:
            return None
        last = min(ends)
        count += max(0, (last - span.first) // span.stride + 1)
    return count
