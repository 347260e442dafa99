"""Checks without Megatron: torch's own DistributedDataParallel over two ranks."""

from pathlib import Path

import torch

from msprobe_megatron.run_directory.directory import read_events
from tests.support.forked import run_forked


def train(config: str, flip: bool) -> float:
    """Four steps; at the third, a bit of a weight flips on rank 1."""
    from msprobe_megatron import attach

    torch.distributed.init_process_group("gloo")
    try:
        torch.manual_seed(1)
        inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        model = torch.nn.parallel.DistributedDataParallel(inner)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with attach(model, optimizer, config):
            for step in range(4):
                if flip and step == 2 and torch.distributed.get_rank() == 1:
                    inner[2].weight.data.view(torch.int32)[0, 1] ^= 1
                optimizer.zero_grad()
                loss = model(torch.full((4, 8), float(step + torch.distributed.get_rank()))).square().mean()
                loss.backward()
                optimizer.step()
        return float(loss)
    finally:
        torch.distributed.destroy_process_group()


def job(root: Path, flip: bool) -> list[dict]:
    config = root / f"probe_{flip}.yaml"
    config.write_text(f"output: {root / str(flip)}\nchecks: {{every: 1}}\n")
    run_forked(2, train, str(config), flip)
    return [event for event in read_events(root / str(flip)) if event["event"] == "alert"]


def test_a_flipped_bit_and_a_clean_run(tmp_path):
    [first, *_] = job(tmp_path, flip=True)
    assert (first["step"], first["name"], first["group"], first["kind"]) == (2, "2.weight", "world", "parameter")
    assert job(tmp_path, flip=False) == []
