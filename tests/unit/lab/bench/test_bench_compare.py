"""`msprobe-megatron bench compare` in a small form: the fault is found, and the lines have their figures."""

import inspect
import json
import re

from msprobe_megatron.analysis.compare import compare as stages
from msprobe_megatron.cli import main
from msprobe_megatron.lab.bench.profiles.compare_profile import STAGES
from msprobe_megatron.lab.bench.profiles.profile import profiles
from msprobe_megatron.lab.bench.tables import compare
from msprobe_megatron.lab.bench.tables.compare import _grid


def test_a_small_pair_and_small_tensors(capsys, tmp_path):
    assert main(["bench", "compare", "--ranks", "8", "--out", str(tmp_path / "out"), "--json"]) == 0
    lines = {line["name"]: line for line in json.loads(capsys.readouterr().out)["results"]}
    rows = lines.pop("rows of 8 ranks")
    assert rows["rows"] > 0
    assert rows["peak_bytes"] > 0
    assert set(lines) == {
        f"tensors {dtype}{cut}" for dtype in ("float32", "bfloat16", "float16") for cut in ("", " cut")
    }
    for line in lines.values():
        assert line["GB_a_second"] > 0
        # The second tensor is 1.01 times the first.
        assert float(line["relative"]) < 0.011


def test_sizes_of_the_pair():
    assert _grid(1024) == {"tp": 8, "pp": 8, "dp": 16}
    for ranks in (1, 2, 4, 8, 64, 512):
        grid = _grid(ranks)
        assert grid["tp"] * grid["pp"] * grid["dp"] == ranks


def test_what_missed_has_its_stages(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "_PROFILED_RANKS", 4)
    monkeypatch.setattr(compare, "_SIDE", 1024)
    rows = {"name": "rows of 1024 ranks", "seconds": 61.0, "target": 60.0}
    tensors = {"name": "tensors bfloat16 cut", "GB_a_second": 1.0, "target": 2.0}
    met = {"name": "tensors float32", "GB_a_second": 2.5, "target": 2.0}
    of_rows, of_tensors = profiles(compare, [rows, tensors, met], tmp_path)
    assert of_rows.startswith("rows of 1024 ranks: by stage, of a pair of 4 ranks: `")
    assert "`match` " in of_rows and "; the most memory is resident in `" in of_rows
    assert sum(int(share) for share in re.findall(r" (\d+)%", of_rows)) > 80
    assert of_tensors.startswith("tensors bfloat16 cut: `") and "`analysis/compare/pairs/elements." in of_tensors
    assert not list(tmp_path.rglob("*.parquet"))


def test_every_stage_is_one_of_compare():
    source = inspect.getsource(stages.compare)
    assert [name for name in STAGES if f"{name}(" not in source] == []
