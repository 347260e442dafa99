"""The `reproduce` and `replay` sections of a probe file: defaults, values, and what is refused by name."""

from pathlib import Path

import pytest

from msprobe_megatron.config import ReplayConfig, ReproduceConfig


def test_defaults_and_values(probe):
    assert probe("dump: {}").reproduce is None
    assert probe("dump: {}\nreproduce: {}").reproduce == ReproduceConfig(1234, "warn", False, "keep", False)
    text = "dump: {}\nreproduce: {seed: null, deterministic: true, dropout: true, weights: by_name, noise_run: true}"
    assert probe(text).reproduce == ReproduceConfig(None, "true", True, "by_name", True)
    assert probe("dump: {}\nreproduce: {deterministic: false}").reproduce.deterministic == "false"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("reproduce: {seed: -1}", ["reproduce.seed: -1", "0 to"]),
        ("reproduce: {seed: yes}", ["reproduce.seed"]),
        ("reproduce: {deterministic: maybe}", ["reproduce.deterministic: 'maybe'", "true, warn, false"]),
        ("reproduce: {weights: random}", ["reproduce.weights: 'random'", "keep, by_name"]),
        ("reproduce: {noise: true}", ["reproduce.noise", "did you mean noise_run"]),
        ("reproduce: true", ["reproduce: true is not a mapping"]),
        ("replay: {modules: [mlp]}", ["replay: ", "has no run"]),
        ("replay: {run: x}", ["has no modules"]),
        ("replay: {run: x, modules: []}", ["has no modules"]),
        ("replay: {run: x, modules: [/a], step: 1}", ["replay.modules[0]", "not closed"]),
        ("replay: {run: x, modules: [a], step: -1}", ["replay.step: -1"]),
    ],
)
def test_refused(refused, text, parts):
    message = refused(f"dump: {{}}\n{text}")
    assert all(part in message for part in parts), message


def test_replay(probe):
    config = probe("dump: {}\nreplay: {run: golden, modules: [mlp, /x$/], step: 3}").replay
    assert config == ReplayConfig(Path("golden"), ("mlp", "/x$/"), 3)


def test_a_file_that_only_reproduces_asks_for_nothing(refused):
    assert "requests nothing" in refused("reproduce: {}")
