"""`msprobe-megatron bench compare` in a small form: the fault is found, and the lines have their figures."""

import json

from msprobe_megatron.bench.compare import _grid
from msprobe_megatron.cli import main


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
