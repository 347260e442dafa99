"""Parts of a model that torch.compile runs are named, because nothing inside them can be recorded."""

import torch
from torch import nn

from msprobe_megatron import attach
from msprobe_megatron.topology.host.blind_spots import compiled


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))


def real_compile():
    # Other tests of this process may have put the emulation in place, where compiling does nothing.
    return getattr(torch.compile, "__wrapped__", torch.compile)


def test_compiled_modules_are_named():
    assert compiled([net()]) == []
    whole = real_compile()(net(), backend="eager")
    assert "the model itself" in compiled([whole])[0]
    model = net()
    model[2] = real_compile()(model[2], backend="eager")
    (text,) = compiled([model])
    assert text.startswith("torch.compile: 1 compiled modules, the first is 2:")


def test_a_compiled_model_trains_as_without_the_kit_and_the_run_says_so(tmp_path):
    config = tmp_path / "probe.yaml"
    config.write_text(f"output: {tmp_path}/out\ndump: {{level: mix}}\n")
    losses = []
    for probed in (False, True):
        torch.manual_seed(0)
        model = net()
        model[0] = real_compile()(model[0], backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = attach(model, optimizer, config) if probed else None
        for _ in range(3):
            loss = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if session is not None:
            session.close()
            assert session.faults == []
    assert losses[:3] == losses[3:]
    assert "torch.compile: 1 compiled modules" in (tmp_path / "out/events.jsonl").read_text()
