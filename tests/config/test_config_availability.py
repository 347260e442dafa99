"""What this release does not do is refused by name; what it does is not."""

import pytest

from msprobe_megatron.config import NOT_YET

ASKING = {
    "perturb": "perturb: {}",
}


@pytest.mark.parametrize("entry", NOT_YET)
def test_each_entry_is_refused_by_name_and_valid_otherwise(entry, probe, refused):
    text = ASKING[entry]
    assert probe(text) is not None
    path, _, value = entry.partition("=")
    message = refused(text, allow_unavailable=False)
    assert message.startswith(f"probe.yaml: {path}: ")
    assert "not available in this release" in message
    assert NOT_YET[entry] in message
    assert "accepted: " in message
    assert value in message


def test_value_is_named(refused, monkeypatch):
    monkeypatch.setitem(NOT_YET, "dump.level=debug", "not here; accepted: L0")
    assert "dump.level: 'debug' is not available" in refused("dump: {level: debug}", allow_unavailable=False)


def test_all_that_is_refused_is_named(refused, monkeypatch):
    monkeypatch.setitem(NOT_YET, "dump.level=debug", "not here; accepted: L0")
    monkeypatch.setitem(NOT_YET, "dump.tensor_list", "not here; accepted: []")
    message = refused("dump: {level: debug, tensor_list: [a]}", allow_unavailable=False)
    assert "dump.level: 'debug' is not available in this release (also: dump.tensor_list): " in message


def test_wrong_comes_before_unavailable(refused):
    message = refused("recorder: {}\nperturb: {mode: nonsense}", allow_unavailable=False)
    assert "perturb.mode: 'nonsense' is not known" in message


def test_what_the_release_does(probe):
    config = probe(
        "dump: {level: mix, task: statistics, digest: true, sketch: 8, apis: core, list: [mlp], layers: [0],"
        " data_mode: [forward], stacks: false, microbatches: [0]}\nlimits: {host_memory: 1GiB, disk: 1GiB}",
        allow_unavailable=False,
    )
    assert config.dump is not None


def test_refusal_is_the_default(probe, tmp_path, monkeypatch):
    monkeypatch.setitem(NOT_YET, "checks.collectives", "not here; accepted: false")
    from msprobe_megatron.config import ConfigError, load

    (tmp_path / "a.yaml").write_text("checks: {collectives: true}")
    with pytest.raises(ConfigError, match="checks.collectives: true is not available in this release"):
        load(tmp_path / "a.yaml")
