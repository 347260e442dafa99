"""Features of a session: who is active, what is called in which order, and probe files that docstrings show."""

import inspect
import textwrap

import pytest

from msprobe_megatron.config import load
from msprobe_megatron.job.features.alerts.feature import AlertsFeature
from msprobe_megatron.job.features.checks.feature import ChecksFeature
from msprobe_megatron.job.features.dump.feature import DumpFeature
from msprobe_megatron.job.features.feature import NEVER, Feature, Features
from msprobe_megatron.job.features.monitor.feature import MonitorFeature
from msprobe_megatron.job.features.recorder.feature import RecorderFeature
from msprobe_megatron.job.features.replay.feature import ReplayFeature

SHOWN = (DumpFeature, MonitorFeature, AlertsFeature, ChecksFeature, RecorderFeature, ReplayFeature)
CALLS = {
    "begin": (),
    "microbatch": ("moment",),
    "reported": ("entry", "moment"),
    "saved": ("variable", "name", True),
    "pause": (),
    "resume": (),
    "memory_changed": (),
    "calls_end": (),
    "before_optimizer": (),
    "after_optimizer": ("result",),
}


class Every(Feature):
    """Wants every `n`-th step and notes what it is called for."""

    def __init__(self, n):
        self.n, self.calls = n, []

    def next_from(self, step):
        return step + -step % self.n

    def __getattribute__(self, name):
        if name in (*CALLS, "finish", "remove"):
            return lambda *values: object.__getattribute__(self, "calls").append((name, *values))
        return super().__getattribute__(name)


def test_only_the_features_that_want_a_step_are_called():
    features = Features([often := Every(2), seldom := Every(3)])
    assert (features.next_from(1), Features([]).next_from(0)) == (2, NEVER)
    assert features.choose(4) and not features.choose(5) and features.choose(4)
    for name, values in CALLS.items():
        getattr(features, name)(*values)
    features.detach()
    features.finish(True)
    assert often.calls == [*((name, *values) for name, values in CALLS.items()), ("remove",), ("finish", True)]
    assert seldom.calls == [] and features.active == []
    features.begin()
    assert often.calls[-1] == ("finish", True), "the step is over"
    features.remove()
    assert seldom.calls == [("remove",)], "all of them"


def test_every_call_of_a_step_has_its_method():
    """A method that a feature may override and that `Features` does not pass on would never be called."""
    own = {"next_from", "obey", "describe", "ledger", "remove", "finish", "close", "not_happened"}
    methods = {name for name, value in vars(Feature).items() if inspect.isfunction(value)}
    assert methods - own == set(CALLS)
    for name in CALLS:
        assert inspect.signature(getattr(Features, name)) == inspect.signature(getattr(Feature, name))


@pytest.mark.parametrize("feature", SHOWN, ids=lambda feature: feature.name)
def test_the_probe_file_of_a_docstring_is_accepted(feature, tmp_path):
    probe = tmp_path / "probe.yaml"
    probe.write_text(textwrap.dedent((feature.__doc__ or "").split("Probe file::\n")[1]))
    config = load(probe)
    section = config.monitor.alerts if feature is AlertsFeature else getattr(config, feature.name)
    assert section
