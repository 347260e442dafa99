"""Optimizers that Megatron builds on and that cannot be installed everywhere, as far as a reader of their states cares.

Written from their documented behaviour: where numbers are kept, in which dtype, under which name and factor. The
steps they make are those of Adam and Muon, by plain torch. The real packages are used where there are any.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import torch

HALF_RANGE = torch.finfo(torch.float16).max / 2
BYTE_RANGE = 448.0


class Bytes(torch.Tensor):
    """Eight bits an element and one factor; calls itself float32, and nothing but `float` gives its numbers."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, factor: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: torch.Tensor, factor: torch.Tensor) -> None:
        self.held, self.factor = data, factor

    def float(self) -> torch.Tensor:
        return self.held.to(torch.float32) * self.factor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].held, args[0].factor)
        raise AssertionError(f"{func}: a reader took the memory for the numbers")


class FusedAdam(torch.optim.Optimizer):
    """Adam that keeps moments and master weights to itself, in the dtypes it is told."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        assert adam_w_mode and master_weights and use_decoupled_grad
        self._dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": master_weight_dtype}
        self._remainders = store_param_remainders and master_weight_dtype is torch.float32
        self._scales: dict[Any, dict[str, torch.Tensor]] = {}
        self.masters: dict[Any, torch.Tensor] = {}
        """What the master weights are, for the test: never looked at by a reader."""

    def get_unscaled_state(self, param: Any, name: str) -> torch.Tensor:
        stored = self.state[param][name]
        if stored.dtype is torch.float16:
            return stored.float() * self._scales[param][name]
        return stored if stored.dtype is torch.int16 or type(stored) is not Bytes else stored.float()

    def _put(self, param: Any, name: str, value: torch.Tensor) -> None:
        state, dtype = self.state[param], self._dtypes[name]
        if name == "master_param" and self._remainders and param.dtype is torch.bfloat16:
            bits = value.view(torch.int32)
            low = (bits & 0xFFFF).to(torch.int16)  # wraps
            param.copy_((((bits - low) >> 16).to(torch.int16)).view(torch.bfloat16))
            state[name] = state[name].copy_(low) if name in state else low
            return
        if name == "master_param":
            param.copy_(value)
        most = {torch.float16: HALF_RANGE, torch.uint8: BYTE_RANGE}.get(dtype)
        factor = torch.ones(1) if most is None else (value.abs().amax() / most).clamp_min(1e-30).reshape(1)
        self._scales.setdefault(param, {})[name] = factor
        scaled = value / factor
        if dtype is torch.uint8:
            state[name] = Bytes(scaled.to(torch.float8_e4m3fn), factor)
        else:
            state[name] = state[name].copy_(scaled) if name in state else scaled.to(dtype, copy=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1 if group["params"] else group.get("step", 0)
            for p in group["params"]:
                if not self.state[p]:
                    for name in ("exp_avg", "exp_avg_sq"):
                        self._put(p, name, torch.zeros_like(p, dtype=torch.float32))
                    self._put(p, "master_param", p.detach().float())
                    self.masters[p] = p.detach().float()
                if getattr(p, "decoupled_grad", None) is not None:
                    self._one(p, group)

    def _one(self, p: Any, group: Any) -> None:
        gradient, (first, second) = p.decoupled_grad.float(), group["betas"]
        # As the real one: what was rounded when it was put away is where the next step begins.
        moment = self.get_unscaled_state(p, "exp_avg").float().lerp(gradient, 1 - first)
        square = (
            self.get_unscaled_state(p, "exp_avg_sq").float().mul(second).addcmul(gradient, gradient, value=1 - second)
        )
        weight = self.masters[p] if self._remainders else self.get_unscaled_state(p, "master_param").float()
        corrected = (square / (1 - second ** group["step"])).sqrt() + group["eps"]
        change = moment / (1 - first ** group["step"]) / corrected + group["weight_decay"] * weight
        weight = weight - group["lr"] * change
        for name, value in (("exp_avg", moment), ("exp_avg_sq", square), ("master_param", weight)):
            self._put(p, name, value)
        self.masters[p] = weight


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """Momentum as a moving average, then an update that the subclass orthogonalises."""

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum_beta: float,
        weight_decay: float,
        *,
        use_nesterov: bool,
        weight_decay_method: str,
        fp32_matmul_prec: str,
        scaled_orthogonalize_fn: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum_beta": momentum_beta, "weight_decay": weight_decay})
        self._nesterov, self.scaled_orthogonalize_fn = use_nesterov, scaled_orthogonalize_fn
        assert weight_decay_method == "decoupled" and fp32_matmul_prec

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                kept = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                kept.lerp_(p.grad, 1 - group["momentum_beta"])
                update = p.grad.lerp(kept, group["momentum_beta"]) if self._nesterov else kept
                p.add_(self.orthogonalize(p, update), alpha=-group["lr"])


def newton_schulz_tp(x: Any, steps: int, coefficient_type: str, tp_group: Any, partition_dim: Any, mode: str) -> Any:
    """The whole matrix on every rank of the group, made orthogonal, and this rank's part of it."""
    whole = x
    if partition_dim is not None:
        parts = [torch.empty_like(x) for _ in range(tp_group.size())]
        torch.distributed.all_gather(parts, x.contiguous(), tp_group)
        whole = torch.cat(parts, partition_dim)
    y = whole / whole.norm().clamp_min(1e-7)
    for _ in range(steps):
        square = y @ y.T
        y = 3.4445 * y + (-4.7750 * square + 2.0315 * square @ square) @ y
    return y if partition_dim is None else y.chunk(tp_group.size(), partition_dim)[tp_group.rank()]


def install_fused_adam() -> None:
    """Let this process's Megatron find it; for the precision-aware optimizer only."""
    import megatron.core.optimizer as built
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    optimizers = types.ModuleType("transformer_engine.pytorch.optimizers")
    optimizers.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    sys.modules["transformer_engine.pytorch.optimizers"] = optimizers
    built.Adam = distrib_optimizer.Adam = FusedAdam
    built.USING_PYTORCH_OPTIMIZER = False
    built.is_te_min_version = optimizer_config.is_te_min_version = lambda *a, **k: True


def install_muon() -> None:
    """Let this process's Megatron find what its Muon is made of, where it does not find the real package."""
    try:
        importlib.import_module("emerging_optimizers.orthogonalized_optimizers")
        return
    except ImportError:
        pass
    package, kinds = types.ModuleType("emerging_optimizers"), "emerging_optimizers.orthogonalized_optimizers"
    module, tools = types.ModuleType(kinds), types.ModuleType(f"{kinds}.muon_utils")
    module.OrthogonalizedOptimizer = OrthogonalizedOptimizer  # type: ignore[attr-defined]
    module.get_muon_scale_factor = lambda rows, columns, mode: max(rows, columns) ** 0.5  # type: ignore[attr-defined]
    tools.newton_schulz_tp = newton_schulz_tp  # type: ignore[attr-defined]
    sys.modules.update({"emerging_optimizers": package, kinds: module, f"{kinds}.muon_utils": tools})
