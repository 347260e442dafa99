"""The `reproduce` section of a probe file: defaults, values, and what is refused by name."""

import pytest

from msprobe_megatron.config import ReproduceConfig


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
    ],
)
def test_refused(refused, text, parts):
    message = refused(f"dump: {{}}\n{text}")
    assert all(part in message for part in parts), message


def test_a_file_that_only_reproduces_asks_for_nothing(refused):
    assert "nothing asked" in refused("reproduce: {}")
