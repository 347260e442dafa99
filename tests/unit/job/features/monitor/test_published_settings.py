"""The settings of msprobe's published baseline, as they are printed there, on a job with as many layers."""

from tests.support.forked import run_forked
from tests.unit.config.msprobe.test_monitor_json import BASELINE
from tests.unit.job.features.monitor.conftest import SHAPE, rows_of
from tests.unit.job.features.monitor.ground_truth import STEP, train
from tests.unit.job.features.monitor.test_values import check, key_of

SIDES = {("activation", "input"), ("activation", "output"), ("gradient", "input"), ("gradient", "output")}


def test_ten_layers_on_one_rank_of_two(tmp_path):
    config, out = tmp_path / "config.json", tmp_path / "out"
    config.write_text(BASELINE.replace("},\n", "}，\n"))
    flags = SHAPE.replace("--num-layers 2", "--num-layers 11").replace("--global-batch-size 8", "--global-batch-size 2")
    flags += " --tensor-model-parallel-size 2 --sequence-parallel"
    argv = [*flags.split(), "--msprobe-config", str(config), "--msprobe-output", str(out)]
    truth = run_forked(2, train, argv)[0]["found"]
    assert [path.name for path in (out / "monitor").iterdir()] == ["rank_00000"]  # module_ranks: "0"
    rows = {key_of(row): row for row in rows_of(out, 0, STEP) if row["kind"] in ("activation", "gradient")}
    watched = {(f"decoder.layers.{layer}", *side) for layer in range(10) for side in SIDES}
    assert {(row["name"], row["kind"], row["io"]) for row in rows.values()} == watched
    assert len(rows) == 10 * 4 * 2  # two microbatches, one tensor on each side: tuple[2]:0 is the hidden state
    for key, row in rows.items():
        check(row, truth[key], key)
