"""msprobe dumps, recipes' overlays, control files and probe files from strangers: our own error or an answer.

Nothing is written outside. A fixed number of inputs in CI; `scripts/fuzz.sh` goes on with new ones for as long as it is
told to.
"""

import json
import os
import resource
import shutil
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from msprobe_megatron.cli import main
from msprobe_megatron.config.document import ConfigError
from msprobe_megatron.config.selection import RankSelection
from msprobe_megatron.hosts.launching import overlays
from msprobe_megatron.job.control import Control
from msprobe_megatron.topology.coordinates import Coordinates
from tests.jobs.trust.damage import CASES

pytestmark = pytest.mark.trust

TRIED = []
EVIL = [
    "../../up",
    "/etc/passwd",
    "a\0b",
    "x" * 4096,
    "</script><script>",
    "=cmd()",
    "\x1b[2J\x1b]0;owned\x07",
    "\ud800",
]


def fuzz(*examples):
    """Settings of a fuzz test: the same inputs every time, unless scripts/fuzz.sh asks for others."""

    def decorate(test):
        for value in examples:
            test = example(value)(test)
        limits = settings(
            max_examples=CASES,
            deadline=None,
            derandomize="MSPROBE_FUZZ_SEED" not in os.environ,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        return limits(test)

    return decorate


# msprobe dumps: names and records that get past the first test, and then what should not be there.

numbers = st.one_of(
    st.integers(-(10**30), 10**30), st.floats(), st.sampled_from([0, 1, 2, 1 << 62, 1 << 63, -1, 10**400, True, None])
)
shapes = st.one_of(
    st.lists(st.integers(0, 64), max_size=4), st.lists(numbers, max_size=5), numbers, st.text(max_size=3)
)
tensors = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["torch.float32", "torch.bfloat16", "", 7, *EVIL]), "shape": shapes},
    optional={key: st.one_of(numbers, st.text(max_size=3)) for key in ("Max", "Min", "Mean", "Norm", "md5")},
)
nested = st.recursive(
    st.one_of(tensors, numbers, st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=8,
)
words = st.one_of(st.sampled_from(["decoder", "layers.0", "mlp", "linear_fc1", *EVIL]), st.text(min_size=1, max_size=6))
names = st.one_of(
    st.builds("Module.{}.{}.forward.{}".format, words, words, numbers),
    st.builds("Module.{}.{}.{}.backward.{}".format, numbers, words, words, st.integers(0, 3)),
    st.builds("Module.{}.{}.parameters_grad".format, words, words),
    st.builds("Torch.{}.{}.forward".format, words, st.integers(0, 10**25)),
    words,
)
records = st.dictionaries(
    st.sampled_from(["input_args", "input", "input_kwargs", "output", "parameters"]), nested, max_size=4
)
dumps = st.fixed_dictionaries({"task": words, "level": words, "data": st.dictionaries(names, records, max_size=6)})
documents = st.one_of(dumps, nested)
folders = st.one_of(
    st.just(("step0", "rank0")),
    st.tuples(st.builds("step{}".format, st.integers(0, 10**30)), st.builds("rank{}".format, st.integers(0, 10**30))),
)


def listing(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def answers(argv, capsys):
    """Exit code 0, 1 or 2; with 2 one line of ours and no traceback."""
    code = main(argv)
    printed = capsys.readouterr()
    assert code in (0, 1, 2)
    if code == 2:
        assert printed.err.startswith("msprobe-megatron: ")
    assert "\x1b]0;owned" not in printed.out + printed.err, "a name steers the terminal"
    return code


@pytest.fixture(scope="module", autouse=True)
def figures():
    yield
    print(f"inputs tried: {len(TRIED)}")


@pytest.fixture
def place():
    folder = Path(tempfile.mkdtemp())
    yield folder
    shutil.rmtree(folder)


def deep(levels):
    text = "[" * levels + "]" * levels
    return text


@pytest.mark.parametrize("source", ["document", "text"])
def test_msprobe_dumps(place, capsys, source):
    texts = (
        documents.map(lambda value: json.dumps(value))
        if source == "document"
        else st.one_of(
            st.text(max_size=60),
            st.binary(max_size=60),
            st.sampled_from([deep(5000), '{"data": ' + deep(5000) + "}", "NaN"]),
        )
    )

    @fuzz()
    @given(texts, folders)
    def check(text, folder):
        TRIED.append(1)
        case = Path(tempfile.mkdtemp(dir=place))
        dump = case / "in" / folder[0] / folder[1] / "dump.json"
        dump.parent.mkdir(parents=True)
        dump.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        before = listing(case / "in")
        if answers(["import", str(case / "in"), "--out", str(case / "out")], capsys) == 0:
            # Reading costs more than importing: one of the readers is enough for most inputs.
            answers(["diagnose" if len(text) % 4 == 0 else "summary", str(case / "out")], capsys)
        assert listing(case / "in") == before
        assert {name.split("/")[0] for name in listing(case)} <= {"in", "out"}
        shutil.rmtree(case)

    check()


# Overlays of recipes.

flags_ = st.one_of(
    st.sampled_from(["num-layers", "seq-length", "bf16", "x;rm -rf", "$(id)", *EVIL]), st.text(max_size=5)
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), st.sampled_from(EVIL)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(flags_, inner, max_size=3)),
    max_leaves=6,
)
KEYS = ("title", "match", "expects", "append", "override", "small", "environment", "probe", "notes", "demo", "other")
overlay_documents = st.one_of(
    st.dictionaries(st.sampled_from(KEYS), values, max_size=6),
    st.fixed_dictionaries(
        {"title": st.text(min_size=1, max_size=5)},
        optional={
            "match": st.dictionaries(st.sampled_from(["recipe", "script"]), st.lists(st.text(max_size=5), max_size=3)),
            "expects": st.dictionaries(flags_, values, max_size=3),
            "override": st.dictionaries(flags_, values, max_size=3),
            "append": st.lists(values, max_size=3),
            "environment": st.dictionaries(flags_, values, max_size=3),
        },
    ),
)


@fuzz()
@given(overlay_documents, st.booleans())
def test_overlays(document, as_json):
    TRIED.append(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "overlay.yaml"
        try:
            text = json.dumps(document) if as_json else yaml.safe_dump(document, allow_unicode=True)
            path.write_text(text, encoding="utf-8", errors="replace")
        except (UnicodeError, yaml.YAMLError):
            return
        try:
            overlay = overlays.read(path)
        except ConfigError as error:
            assert str(path) in str(error)
            return
        argv = ["--num-layers", "2", "--bf16", "--seq-length=8"]
        assert all(isinstance(word, str) for word in overlay.arguments(argv, small=True))
        assert all(isinstance(text, str) for text in overlay.drift(argv))
        assert overlay.matches("examples/llama2/pretrain.sh") in (True, False)
        assert os.listdir(folder) == ["overlay.yaml"]


@fuzz()
@given(st.binary(max_size=200))
def test_overlays_of_any_bytes(content):
    TRIED.append(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "overlay.yaml"
        path.write_bytes(content)
        with pytest.raises(ConfigError) if not _could_be_one(content) else _either():
            overlays.read(path)


def _could_be_one(content):
    return b"title" in content


def _either():
    import contextlib

    return contextlib.suppress(ConfigError)


# Control files: whoever may write into the run directory, in a job that must not notice.

orders = st.one_of(
    st.dictionaries(st.sampled_from(["steps", "next", "level", "dump", "monitor", "other"]), values, max_size=4),
    st.fixed_dictionaries({"steps": st.sampled_from(["1-3", "0-10/2", "7-", "9" * 5000, "all", 3, [1, "2-4"]])}),
    values,
)


@fuzz()
@given(st.one_of(orders.map(json.dumps), st.text(max_size=40), st.binary(max_size=80), st.just(deep(9000))))
def test_control_files(content):
    TRIED.append(1)
    obeyed, said = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "control.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        control = Control(Path(folder), Coordinates(), RankSelection(), lambda text, event: said.append(text))
        told = control.apply_due(3, lambda order: obeyed.append(order) or True)
        assert told == bool(obeyed) and len(said) == 1, "obeyed or refused, and said once"
        assert told or "nothing changes" in said[0] and str(path) in said[0]
        assert not control.apply_due(4, lambda order: True), "looked at once"
        assert os.listdir(folder) == ["control.json"]


def test_memory_is_not_taken_for_sizes_that_are_only_claimed(place, capsys):
    """Shapes of 10^18 elements are numbers in a file, never an allocation."""
    dump = place / "in" / "step0" / "rank0" / "dump.json"
    dump.parent.mkdir(parents=True)
    tensor = {"dtype": "torch.float32", "shape": [1 << 30, 1 << 29], "Max": 1, "Min": 0, "Mean": 0.5, "Norm": 3}
    data = {f"Module.a{i}.Linear.forward.0": {"output": [tensor]} for i in range(50)}
    dump.write_text(json.dumps({"data": data}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert answers(["import", str(place / "in"), "--out", str(place / "out")], capsys) == 0
    answers(["summary", str(place / "out")], capsys)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10
