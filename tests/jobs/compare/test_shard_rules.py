"""Shard specs given by the user: a tensor whose layout the kit does not know is merged as they say."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from msprobe_megatron.analysis.compare.compare import compare
from msprobe_megatron.analysis.load.run import RunError, open_run
from msprobe_megatron.cli import main
from msprobe_megatron.config import ConfigError
from msprobe_megatron.config.sections import shards
from msprobe_megatron.topology.shards import ORDERS, ShardSpec

_FC1 = "s b[dp:samples] f[tp:gated]"


@pytest.fixture(scope="module")
def unknown(runs, tmp_path_factory):
    """The TP2 run as if nobody knew how the outputs of fc1 are cut."""
    root = tmp_path_factory.mktemp("rules") / "unknown"
    shutil.copytree(runs.saved("tp2"), root)
    for file in root.glob("step_*/rank_*/records.parquet"):
        table = pq.read_table(file)
        ours = [
            (n.endswith("linear_fc1"), io, path) == (True, "output", "0")
            for n, io, path in zip(*(_texts(table, c) for c in ("name", "io", "path")), strict=True)
        ]
        texts = ["?nobody knows" if hit else text for hit, text in zip(ours, _texts(table, "shard"), strict=True)]
        whole = [None if hit else w for hit, w in zip(ours, table.column("global_shape").to_pylist(), strict=True)]
        for name, values in (("shard", texts), ("global_shape", whole)):
            field = table.schema.field(name)
            table = table.set_column(table.schema.get_field_index(name), field, pa.array(values).cast(field.type))
        pq.write_table(table, file)
    return root


def _texts(table, column):
    return table.column(column).to_pylist()


def _fc1(result):
    rows = (row for row in result.table.to_pylist() if row["name"].endswith("linear_fc1"))
    return [row for row in rows if row["io"] == "output" and row["path"] == "0"]


def test_a_spec_makes_the_unknown_comparable(runs, unknown, tmp_path, capsys):
    golden = str(runs.saved("single"))
    assert main(["compare", golden, str(unknown), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"].keys() == {"nobody knows"}
    specs = tmp_path / "specs.yaml"
    specs.write_text(f"shards:\n  - {{name: linear_fc1, io: output, path: '0', shard: '{_FC1}'}}\n")
    assert main(["compare", golden, str(unknown), "--specs", str(specs), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["layout"] == {}
    assert answer["counts"]["agree"] > 500
    result = compare(open_run(golden), open_run(unknown, shards.load_shards(specs)))
    rows = _fc1(result)
    assert {row["state"] for row in rows} == {"agree"}
    # Gate and up lie as the spec says: the elements agree, not only their sums.
    assert min(row["cosine"] for row in rows) > 0.9999


def test_a_wrong_spec_diverges(runs, unknown):
    rules = (shards.ShardRule("linear_fc1", _FC1.replace(":gated", ""), io="output"),)
    result = compare(open_run(runs.saved("single")), open_run(unknown, rules))
    assert result.verdict == "diverged"
    assert result.first_divergence.name.endswith("linear_fc1")


def test_a_spec_of_other_dimensions_says_so(runs, unknown):
    rules = (shards.ShardRule("linear_fc1", "s h", io="output", path="0"),)
    result = compare(open_run(runs.saved("single")), open_run(unknown, rules))
    assert list(result.layout) == ["3 dimensions where 's h' was given"]


def test_the_probe_file_of_a_run_may_hold_specs(runs, unknown, tmp_path):
    root = tmp_path / "own"
    shutil.copytree(unknown, root)
    facts = json.loads((root / "run.json").read_text())
    facts["probe"]["content"]["shards"] = [{"name": "/fc1$/", "io": "output", "path": "0", "shard": _FC1}]
    (root / "run.json").write_text(json.dumps(facts))
    assert {row["state"] for row in _fc1(compare(open_run(runs.saved("single")), open_run(root)))} == {"agree"}
    # What the command line says goes first.
    rules = (shards.ShardRule("linear_fc1", "?left out", io="output"),)
    assert list(compare(open_run(runs.saved("single")), open_run(root, rules)).layout) == ["left out"]
    facts["probe"]["content"]["shards"] = [{"name": "x"}]
    (root / "run.json").write_text(json.dumps(facts))
    with pytest.raises(RunError, match="has no shard"):
        open_run(root)


def test_a_spec_that_fits_nothing_is_told(runs):
    rules = (shards.ShardRule("nobody", "s b h"),)
    result = compare(open_run(runs.saved("single"), rules), open_run(runs.saved("tp2"), rules))
    assert result.verdict == "agree"
    assert "shards: 'nobody' matches no recorded tensor" in result.hints


def test_statistics_and_digests_of_a_changed_spec(runs):
    """The digest of a tensor whose spec is replaced counts no more; the others' still do."""
    rules = (shards.ShardRule("layers.1.mlp.linear_fc1.weight", "d0[tp] d1"),)
    rows = open_run(runs.sketched("tp2"), rules).rows().filter("kind = 'parameter' and name like '%linear_fc1.weight'")
    found = {name: (digest, text) for name, digest, text in rows.project("name, digest, shard").fetchall()}
    assert found["decoder.layers.1.mlp.linear_fc1.weight"] == (None, "d0[tp] d1")
    assert found["decoder.layers.2.mlp.linear_fc1.weight"][0] is not None


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("shards: [{name: x, shard: 's[xp] b'}]", ["shards[0].shard", "axis 'xp'", "tp, pp"]),
        ("shards: [{name: x, shard: 's[cp:round] b'}]", ["order 'round'", "zigzag"]),
        ("shards: [{name: x, shard: 's[cp b'}]", ["dimension 's[cp'"]),
        ("shards: [{name: x, shard: 's; flat 1:2'}]", ["ends in 'flat 1:2'"]),
        ("shards: [{name: x, shard: '?'}]", ["no reason"]),
        ("shards: [{name: x}]", ["has no shard"]),
        ("shards: [{name: /x, shard: s}]", ["not closed"]),
        ("shards: [{name: x, shard: s, kind: weights}]", ["shards[0].kind", "'weights'", "parameter"]),
        ("shards: [{nam: x, shard: s}]", ["did you mean name"]),
        ("shards: x", ["is not a list"]),
        ("steps: [1]", ["unknown key", "shards"]),
        ("{}", ["has no rules"]),
    ],
)
def test_what_is_wrong_is_refused_by_name(tmp_path, text, parts):
    file = tmp_path / "specs.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        shards.load_shards(file)
    assert all(part in str(caught.value) for part in ["specs.yaml", *parts]), str(caught.value)


@pytest.mark.parametrize("text", ["s[cp:zigzag,tp] b[dp:samples] h", "d0[tp:gated] d1", "s*b e; partial etp", "?why"])
def test_both_grammars_read_the_same(text, tmp_path):
    """The probe file is checked without torch, by a grammar of its own: it must be that of the specs."""
    file = tmp_path / "specs.yaml"
    file.write_text(json.dumps({"shards": [{"name": "x", "shard": text}]}))
    (rule,) = shards.load_shards(file)
    assert str(ShardSpec.parse(rule.shard)) == text
    assert shards.ORDERS == ORDERS
