"""What a training job really held, seen by hooks of the test's own and worked out in NumPy, in float64.

Knows Megatron and torch, not the monitor; only canonical names come from the kit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

STEP = 1
"""The one step whose numbers are kept; the optimizer has moments by then."""


MOMENTA = ("exp_avg", "momentum_buffer")


def state_of(inner: Any, main: Any, name: str) -> torch.Tensor:
    """The numbers of a state; those of 16 and 8 bits have a factor, and are what their product is in float32."""
    stored = inner.state[main][name]
    memory, scales = getattr(stored, "held", stored), getattr(inner, "_scales", {})
    factor = scales[main][name].double() if main in scales else 1.0
    return (memory.double() * factor).float() if main in scales else memory


def weight_of(inner: Any, main: Any) -> torch.Tensor:
    """What the step changes, as exactly as it is kept: the optimizer of these tests notes its master weights."""
    masters = getattr(inner, "masters", {})
    if "master_param" not in inner.state.get(main, {}):
        return main.detach() if not hasattr(inner, "masters") else main.detach().float()
    if inner.state[main]["master_param"].dtype is torch.int16:
        return masters[main]
    return state_of(inner, main, "master_param")


def figures(tensor: torch.Tensor) -> list[float]:
    """min, max, sum, sumsq, absmax, zeros, elements, and the sum of absolute values, which bounds rounding."""
    x = tensor.detach().double().reshape(-1).numpy()
    return [
        float(x.min()),
        float(x.max()),
        float(x.sum()),
        float((x * x).sum()),
        float(np.abs(x).max()),
        float((x == 0).sum()),
        float(x.size),
        float(np.abs(x).sum()),
    ]


class Truth:
    """Watches one rank of a job; `found` maps kind, name, io, path, microbatch to figures."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}
        self.step = 0
        self._names: dict[int, str] = {}
        self._before: dict[int, torch.Tensor] = {}
        self._microbatch: dict[str, int] = {}
        self._calls: dict[str, int] = {}

    def put(self, kind: str, name: str, io: str, path: str, microbatch: int | None, tensor: torch.Tensor) -> None:
        if self.step == STEP and tensor.numel():
            key = "|".join(map(str, (kind, name, io, path, microbatch)))
            assert key not in self.found, key
            self.found[key] = figures(tensor)

    def ready(self, chunks: list[Any], optimizer: Any) -> None:
        from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

        from msprobe_megatron.topology import names

        self.chunks, self.optimizer = chunks, optimizer
        self.leaves = list(getattr(optimizer, "chained_optimizers", [optimizer]))
        for chunk in chunks:
            for entry in names.parameters(chunk):
                self._names[id(entry.parameter)] = entry.name
                entry.parameter.register_hook(self._of_microbatch(entry.name))
            for entry in names.modules(chunk):
                if type(entry.module).__name__ == "TransformerLayer":
                    entry.module.register_forward_hook(self._layer(entry.name), with_kwargs=True)
                elif type(entry.module).__name__ == "DotProductAttention":
                    entry.module.register_forward_hook(self._attention(entry.name), with_kwargs=True)
                elif type(entry.module).__name__ == "TopKRouter":
                    entry.module.register_forward_hook(self._router(entry.name))
        original, truth = _ParamAndGradBucketGroup.start_grad_sync, self

        def start_grad_sync(group: Any, *args: Any, **kwargs: Any) -> Any:
            if group.grad_reduce_handle is None:
                for bucket in group.buckets:
                    parallel = getattr(group, "data_parallel_group", None) or group.__dict__.get(
                        "intra_distributed_optimizer_instance_group"
                    )
                    for parameter in bucket.params_list if parallel.size() > 1 else ():
                        name = truth._names[id(parameter)]
                        truth.put("grad_unreduced", name, "weight", "", None, parameter.main_grad)
            return original(group, *args, **kwargs)

        _ParamAndGradBucketGroup.start_grad_sync = start_grad_sync
        for leaf in self.leaves:
            if leaf.optimizer is not None:
                leaf.optimizer.register_step_pre_hook(self._inner_step)

    def _layer(self, name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            if not torch.is_grad_enabled():
                return
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            result = output[0] if isinstance(output, tuple) else output
            number = self._calls.get(name, 0)
            self._calls[name] = number + 1
            self.put("activation", name, "input", "hidden_states", number, hidden)
            self.put("activation", name, "output", "0", number, result)
            if result.requires_grad:
                result.register_hook(lambda g: self.put("gradient", name, "output", "0", number, g))
            if hidden.requires_grad:
                hidden.register_hook(lambda g: self.put("gradient", name, "input", "hidden_states", number, g))

        return hook

    def _number(self, name: str) -> int:
        self._calls[name] = self._calls.get(name, -1) + 1
        return self._calls[name]

    def _attention(self, name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            query, key = (x.detach().double().numpy() for x in args[:2])
            number, entropies, largest = self._number(name), [], []
            for head in range(query.shape[2]):
                logits = query[:, 0, head] @ key[:, 0, head].T / np.sqrt(query.shape[-1])
                for row, line in enumerate(logits):
                    seen = line[: row + 1]  # causal
                    shares = np.exp(seen - seen.max()) / np.exp(seen - seen.max()).sum()
                    entropies.append(-(shares * np.log(shares)).sum())
                    largest.append(seen.max())
            self.put("scalar", name, "attention_entropy", "", number, torch.tensor(entropies))
            self.put("scalar", name, "attention_logit", "", number, torch.tensor(largest))

        return hook

    def _router(self, name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            number, routing = self._number(name), output[1].numpy()
            self.put("scalar", name, "expert_load", "", number, torch.tensor(routing.sum(0)))
            dropped = routing.shape[0] * module.topk - routing.sum()
            self.put("scalar", name, "dropped_tokens", "", number, torch.tensor(float(dropped)))
            hidden = args[0].detach().double().numpy().reshape(-1, args[0].shape[-1])
            logits = hidden @ module.weight.detach().double().numpy().T
            shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            entropy = -(shares * np.log(shares)).sum(1)
            self.put("scalar", name, "router_entropy", "", number, torch.tensor(entropy))

        return hook

    def _of_microbatch(self, name: str) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            number = self._microbatch.get(name, 0)
            self._microbatch[name] = number + 1
            self.put("grad_unreduced", name, "weight", "microbatch", number, gradient)

        return hook

    def _owned(self) -> list[tuple[Any, Any, Any, slice]]:
        """Leaf, parameter, what the leaf's optimizer works on, and which part of the flat parameter that is."""
        found = []
        for leaf in self.leaves:
            kind = type(leaf).__name__
            if leaf.optimizer is None:
                continue
            if kind == "DistributedOptimizer":
                aware = leaf.config.use_precision_aware_optimizer
                halves = leaf.shard_float16_groups if aware else leaf.shard_fp32_from_float16_groups
                pairs = [
                    *zip(sum(leaf.model_float16_groups, []), sum(halves, []), strict=True),
                    *zip(sum(leaf.model_fp32_groups, []), sum(leaf.shard_fp32_groups, []), strict=True),
                ]
                for parameter, main in pairs:
                    part = self._range(leaf, parameter)
                    assert main.numel() == part.stop - part.start
                    found.append((leaf, parameter, main, part))
            elif kind == "Float16OptimizerWithFloat16Params":
                for parameter, main in zip(
                    sum(leaf.float16_groups, []), sum(leaf.fp32_from_float16_groups, []), strict=True
                ):
                    found.append((leaf, parameter, main, slice(0, parameter.numel())))
            else:
                for group in leaf.optimizer.param_groups:
                    found += [(leaf, p, p, slice(0, p.numel())) for p in group["params"]]
        return found

    def _range(self, leaf: Any, parameter: Any) -> slice:
        """From the memory itself: which elements of the gradient lie in this rank's share of their bucket."""
        for buffer in leaf.buffers:
            if parameter in buffer.param_index_map:
                start, stop, bucket_id = buffer.param_index_map[parameter]
                bucket = buffer.buckets[bucket_id]
                share = bucket.grad_data.numel() // buffer.data_parallel_group.size()
                first = bucket.offset + share * buffer.data_parallel_group.rank()
                return slice(max(start, first) - start, min(stop, first + share) - start)
        raise AssertionError("a parameter without a buffer")

    def gradients(self, iteration: int) -> None:
        """The schedule has returned, the optimizer has not begun."""
        for leaf, parameter, _, part in self._owned():
            name = self._names[id(parameter)]
            self.put("grad_reduced", name, "weight", "", None, parameter.main_grad.reshape(-1)[part])
            assert leaf is not None
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                name = self._names[id(parameter)]
                self.put("parameter", name, "weight", "before", None, parameter)
                if parameter.dim() == 2 and "embedding" not in name:
                    singular = np.linalg.svd(parameter.detach().double().numpy(), compute_uv=False)
                    self.put("scalar", name, "spectral_norm", "", None, torch.tensor(singular[0]))
                    rank = (singular**2).sum() / singular[0] ** 2
                    self.put("scalar", name, "stable_rank", "", None, torch.tensor(rank))

    def _inner_step(self, inner: Any, *ignored: Any) -> None:
        for leaf, parameter, main, _ in self._owned():
            if leaf.optimizer is not inner:
                continue
            name = self._names[id(parameter)]
            self._before[id(main)] = weight_of(inner, main).clone()
            gradient = getattr(main, "decoupled_grad", main.grad)
            self.put("grad_clipped", name, "weight", "", None, gradient)
            states = inner.state.get(main, {})
            momentum = next((state for state in MOMENTA if state in states), None)
            if momentum is not None:
                kept = state_of(inner, main, momentum).double().numpy()
                same = np.sign(gradient.double().numpy()) == np.sign(kept)
                self.put("optimizer_state", name, "sign_agreement", "", None, torch.from_numpy(same))

    def after(self, step: Any) -> None:
        """The optimizer has stepped."""
        for leaf, parameter, main, part in self._owned():
            name = self._names[id(parameter)]
            inner = leaf.optimizer
            for state in (*MOMENTA, "exp_avg_sq"):
                if state in inner.state[main]:
                    self.put("optimizer_state", name, state, "", None, state_of(inner, main, state))
            now = weight_of(inner, main)
            if hasattr(inner, "masters") or (main is not parameter and main.dtype != parameter.dtype):
                self.put("optimizer_state", name, "master_weight", "", None, now)
            before = self._before.pop(id(main))
            self.put("update", name, "change", "", None, now.detach() - before)
            self.put("update", name, "weight", "", None, before)
            ratio = (now.detach() - before).double().norm() / before.double().norm()
            if before.double().norm() > 0:
                self.put("update", name, "ratio", "", None, ratio)
            if self.chunks[0].ddp_config.overlap_param_gather:
                # What other ranks have updated comes with the next forward.
                self.put("parameter", name, "weight", "after", None, parameter.detach().reshape(-1)[part])
        for chunk in self.chunks if not self.chunks[0].ddp_config.overlap_param_gather else ():
            for parameter in chunk.parameters():
                self.put("parameter", self._names[id(parameter)], "weight", "after", None, parameter)
        if step.grad_norm is not None:
            self.put("loss", "grad_norm", "value", "", None, torch.tensor(step.grad_norm, dtype=torch.float64))
        self.step += 1
        self._microbatch.clear()
        self._calls.clear()


def train(argv: list[str], stand_in: bool = False) -> dict[str, Any]:
    """One rank: train under the monitor and return what was really there."""
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    if stand_in:
        from tests.unit.job.features.monitor import stand_ins

        stand_ins.install_fused_adam() if "--use-precision-aware-optimizer" in argv else stand_ins.install_muon()
    truth = Truth()
    run(argv, Callbacks(ready=truth.ready, gradients=truth.gradients, step=truth.after))
    return {"found": truth.found, "optimizers": [type(leaf).__name__ for leaf in truth.leaves]}
