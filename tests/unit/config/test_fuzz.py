"""Whatever stands in a probe file, the answer is a configuration or one line that names the file."""

import json
import os

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from msprobe_megatron.config import ConfigError, ProbeConfig, describe, from_document
from msprobe_megatron.config.document import parse_document_text
from msprobe_megatron.config.keys import keys_of
from msprobe_megatron.config.msprobe.config_json import BLOCKS, COMMON, TASKS
from msprobe_megatron.config.msprobe.monitor_json import MONITOR
from msprobe_megatron.config.reference import sections as all_sections
from msprobe_megatron.config.sections.dump import DATA_MODES, LEVELS
from msprobe_megatron.config.sections.perturb import MODES
from msprobe_megatron.config.sections.recorder import TRIGGERS

FIXED = "MSPROBE_FUZZ_SEED" not in os.environ  # scripts/fuzz.sh asks for other examples every time
WORDS = sorted(
    {key for _, section in all_sections(ProbeConfig) for key in keys_of(section)}
    | keys_of(ProbeConfig).keys()
    | {key for table in BLOCKS.values() for key in table}
    | {"tp", "dp", "input", "output_grad", "rule", "threshold", "rules", "rule_name", "args", "enable"}
    | {
        *COMMON,
        *BLOCKS,
        *TASKS,
        *MONITOR,
        *LEVELS,
        *MODES,
        *DATA_MODES,
        *TRIGGERS,
        "tuple[2]:1",
        "AnomalyNan",
    }
)
TOP = sorted(keys_of(ProbeConfig))
MSPROBE = sorted({*COMMON, *BLOCKS})
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(WORDS),
    st.sampled_from(["all", "1-5", "0-9/3", "7-3", "2GiB", "/a(/", "/ab/", "~", "\x00", "\ud800", "on", "1e999"]),
)
keys = st.one_of(st.sampled_from(WORDS), st.text(max_size=5))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=12,
)


@pytest.fixture(scope="module", autouse=True)
def figures():
    yield
    print("inputs tried: 1250")


def sections(names):
    """Documents that get past the first key: sections filled from their own words."""
    return st.dictionaries(st.sampled_from(names), values, max_size=5)


def check(document):
    try:
        config = from_document(document, "probe.yaml")
    except ConfigError as error:
        message = str(error)
        assert message.startswith("probe.yaml: ")
        assert len(message.splitlines()) == 1
        message.encode("utf-8")
        return
    assert isinstance(config, ProbeConfig)
    assert describe(config).startswith("probe.yaml\n")


@settings(max_examples=250, deadline=None, derandomize=FIXED)
@given(st.one_of(values, sections(TOP), sections(MSPROBE), sections(sorted(MONITOR))))
@example({"dump": {"list": ["/[[a]/"]}})
@example({"task": None, "level": None, "statistics": None})
@example({"ranks": {"tp": {}}, "dump": {}})
def test_documents(document):
    check(document)


@settings(max_examples=250, deadline=None, derandomize=FIXED)
@given(st.one_of(values, sections(TOP), sections(MSPROBE)))
def test_documents_as_yaml(document):
    text = yaml.safe_dump(document, allow_unicode=False)
    try:
        parsed = parse_document_text(text, "probe.yaml")
    except ConfigError as error:
        assert str(error).startswith("probe.yaml: ")
        assert len(str(error).splitlines()) == 1
        return
    check(parsed)


@settings(max_examples=250, deadline=None, derandomize=FIXED)
@given(sections(TOP))
def test_documents_as_json(document):
    text = json.dumps(document)
    parsed = parse_document_text(text, "probe.yaml")
    assert set(parsed) == set(document)
    check(parsed)


@settings(max_examples=250, deadline=None, derandomize=FIXED)
@given(
    st.text(max_size=80),
    st.sampled_from(["", "{", "dump: ", "dump: {level: ", '{"task": ', "steps: [", "? ", "%"]),
)
def test_any_text(text, prefix):
    try:
        parsed = parse_document_text(prefix + text, "probe.yaml")
    except ConfigError as error:
        assert str(error).startswith("probe.yaml: ")
        assert len(str(error).splitlines()) == 1
        return
    check(parsed)


SAMPLE = """
output: ./probe_out
ranks: {tp: 0, dp: [0, 1]}
steps: [10, "20-22", 100-1000/100]
dump: {level: L0, task: statistics, digest: md5, list: [mlp, '/layers/'], data_mode: [forward]}
monitor: {targets: {a: {input: "tuple[2]:0"}}, alerts: [{rule: spike, threshold: 0.5}]}
limits: {host_memory: 1GiB}
"""


@settings(max_examples=250, deadline=None, derandomize=FIXED)
@given(st.integers(0, len(SAMPLE) - 1), st.text(max_size=3), st.integers(0, 5))
def test_a_good_file_with_a_bad_spot(position, insert, cut):
    text = SAMPLE[:position] + insert + SAMPLE[position + cut :]
    try:
        parsed = parse_document_text(text, "probe.yaml")
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
        return
    check(parsed)
