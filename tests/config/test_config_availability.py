"""What this release does not do is refused by name; what it does is not."""

import pytest

from msprobe_megatron.config import NOT_YET

ASKING = {
    "dump.level=L1": "dump: {level: L1}",
    "dump.level=mix": "dump: {level: mix}",
    "dump.level=debug": "dump: {level: debug}",
    "dump.task=tensor": "dump: {task: tensor}",
    "dump.task=structure": "dump: {task: structure}",
    "dump.task=nonfinite": "dump: {task: nonfinite}",
    "dump.digest": "dump: {digest: md5}",
    "dump.sketch": "dump: {sketch: 8}",
    "dump.scope": "dump: {scope: [a, b]}",
    "limits.disk": "dump: {}\nlimits: {disk: 1GiB}",
    "monitor": "monitor: {}",
    "perturb": "perturb: {}",
    "checks": "checks: {}",
    "recorder": "recorder: {}",
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


def test_value_is_named(refused):
    assert "dump.digest: true is not available" in refused("dump: {digest: true}", allow_unavailable=False)
    assert "dump.scope: ['a', 'b'] is not" in refused("dump: {scope: [a, b]}", allow_unavailable=False)


def test_all_that_is_refused_is_named(refused):
    message = refused("dump: {level: L1, sketch: 3}\nmonitor: {}", allow_unavailable=False)
    assert "dump.level: 'L1' is not available in this release (also: dump.sketch, monitor): " in message


def test_wrong_comes_before_unavailable(refused):
    message = refused("monitor: {}\nperturb: {mode: nonsense}", allow_unavailable=False)
    assert "perturb.mode: 'nonsense' is not known" in message


def test_what_the_release_does(probe):
    config = probe(
        "dump: {level: L0, task: statistics, digest: false, sketch: 0, scope: [], list: [mlp], layers: [0],"
        " data_mode: [forward], stacks: false, microbatches: [0]}\nlimits: {host_memory: 1GiB}",
        allow_unavailable=False,
    )
    assert config.dump is not None


def test_refusal_is_the_default(probe, tmp_path):
    from msprobe_megatron.config import ConfigError, load

    (tmp_path / "a.yaml").write_text("checks: {}")
    with pytest.raises(ConfigError, match="checks: not available in this release"):
        load(tmp_path / "a.yaml")
