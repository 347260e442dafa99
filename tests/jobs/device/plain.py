"""A loop of plain torch on the device that never makes the host wait, with or without the kit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

library = torch.library.Library("msprobe_device_test", "DEF")
library.define("noisy(Tensor x) -> Tensor")


def _noisy(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + 0.01 * torch.rand_like(x))


library.impl("noisy", _noisy, "CompositeExplicitAutograd")


class NoisyFunction(torch.autograd.Function):
    """A fused operator that draws from the device's generator and does not say so, as some attention does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.msprobe_device_test.noisy(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Noisy(nn.Module):
    def forward(self, x):
        return NoisyFunction.apply(x)


class Scale(nn.Module):
    """Takes a table that lies in host memory."""

    def forward(self, x, table):
        return x * table.to(x.device, non_blocking=True)


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.middle = {"noisy": Noisy, "host_tensor": Scale}.get(kind, nn.GELU)()
        self.table = torch.arange(8.0).pin_memory() if kind == "host_tensor" else None

    def forward(self, x):
        x = torch.softmax(self.first(x), -1)
        return self.last(self.middle(x) if self.table is None else self.middle(x, self.table))


def loop(
    out: str,
    probe: dict[str, Any] | None,
    kind: str = "plain",
    planted: dict[str, int] | None = None,
    gaps: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Train three steps; the numbers, what the device counted in the last step, and what the kit says of itself."""
    from msprobe_megatron import attach
    from msprobe_megatron.hosts.rehearsal import simulated_device

    torch.manual_seed(1)
    net = Net(kind).npu()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    x = torch.linspace(-1, 1, 32).view(4, 8).npu()
    session = None
    if probe is not None:
        config = Path(out).with_suffix(".yaml")
        config.write_text(json.dumps({"output": out, "steps": ["0-2"], **probe}))
        session = attach(net, optimizer, config)
    trace = simulated_device.Trace(launches=True)
    with simulated_device.planted(**(planted or {})), simulated_device.gaps(*gaps):
        for step in range(3):
            if step == 2:
                trace.__enter__()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trace.__exit__()
        if session is not None:
            session.close()
    ledger = json.loads(Path(out, "ranks/rank_00000.json").read_text())["ledger"] if probe is not None else {}
    return {
        "loss": loss.detach().cpu(),
        "parameters": [p.detach().cpu() for p in net.parameters()],
        "rng": [torch.get_rng_state(), torch.npu.get_rng_state()],
        "counts": trace.counts,
        "together": sum(e.what == "msprobe::measure_into_slots" for e in trace.entries if e.kind == "launch"),
        "waits": [str(entry) for entry in trace.waits if not entry.thread.startswith("msprobe")],
        "ledger": json.dumps(ledger),
    }
