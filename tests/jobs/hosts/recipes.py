"""What is asked of the launch recipes of ModelLink and of MindSpeed-LLM alike: started under the kit, and trained."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from msprobe_megatron.analysis.diagnose.diagnose import diagnose
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.hosts.launching.overlays import Overlay, all_overlays
from tests.jobs.hosts.megatron_lm import Finished
from tests.jobs.hosts.modellink import WORLD, Host
from tests.unit.hosts.launching.stub import RECIPES, Bench


def overlays_of(host: str) -> dict[str, Overlay]:
    """The overlays for one host, such as `modellink`, by name."""
    return {overlay.name: overlay for overlay in all_overlays(RECIPES) if overlay.name.startswith(f"{host}/")}


def recipes_of(checkout: Path, overlay: Overlay) -> list[Path]:
    """The pre-training recipes for torch that the overlay is for; without one the test is skipped."""
    found = [path for path in sorted((checkout / "examples").rglob("pretrain_*.sh")) if "mindspore" not in path.parts]
    found = [path for path in found if overlay.matches(str(path.relative_to(checkout)))]
    if not found:
        pytest.skip(f"this checkout has no recipe that {overlay.name} is for")
    return found


def check_start(checkout: Path, overlay: Overlay, folder: Path, deterministic: str) -> None:
    """Each recipe, untouched, calls the launcher with the kit's runner, its probe file and the overlay's flag."""
    bench = Bench(folder)
    (folder / "checkout").symlink_to(checkout)
    (folder / "logs").mkdir()
    recipes = recipes_of(checkout, overlay)
    for recipe in recipes:
        before = recipe.read_bytes()
        done = bench.run("--overlay", overlay.name, "--", recipe, cwd=folder)
        assert done.returncode == 0, (recipe.name, done.stdout[-800:], done.stderr[-800:])
        call = bench.called()[-1]
        at = next(index for index, word in enumerate(call.argv) if word.endswith("pretrain_gpt.py"))
        assert call.argv[at - 2 : at] == ["-m", "msprobe_megatron.run"], recipe.name
        assert "--msprobe-config" in call.argv[at:]
        assert deterministic in call.argv[at:]
        assert recipe.read_bytes() == before
    print(f"{overlay.name}: {len(recipes)} recipes")


def check_same_numbers(host: Host, recipe: Path, folder: Path, overlay: str, release: str) -> None:
    """A recipe prints the losses and norms of a run without the kit, and is recorded whole."""
    if not recipe.is_file():
        pytest.skip(f"this checkout has no {recipe.relative_to(host.checkout)}")
    before = host.state()
    plain = host.rehearse(recipe, folder / "plain", overlay, kit=False)
    probed = host.rehearse(recipe, folder / "probed", overlay, kit=True)
    assert sorted(plain.iterations) == [1, 2, 3, 4, 5], plain.tail()
    assert not (folder / "plain/out").exists()
    assert probed.iterations == plain.iterations, probed.tail()
    check_rehearsal(folder / "probed/out", probed)
    run = json.loads((folder / "probed/out/run.json").read_text())
    assert run["versions"]["megatron-core"].startswith(release)
    assert run["sizes"]["pp"] == WORLD
    assert host.state() == before


def check_rehearsal(out: Path, probed: Finished) -> None:
    """Every rank recorded its steps whole, healthy, and every tensor says which part of the whole it is."""
    assert probed.code == 0, probed.tail()
    # A step that fp16 skips is printed without a loss.
    assert re.findall(r"iteration +(\d+)/ +5 \|", probed.output) == ["1", "2", "3", "4", "5"], probed.tail()
    microbatches = 4 // json.loads((out / "run.json").read_text())["sizes"]["dp"]
    for rank in range(WORLD):
        ledger = json.loads((out / f"ranks/rank_{rank:05d}.json").read_text())["ledger"]
        assert (ledger["faults"], ledger["not_happened"], ledger["steps"]) == ([], [], [0, 2])
        found = pq.read_table(out / f"step_000002/rank_{rank:05d}/records.parquet").to_pylist()
        assert {row["microbatch"] for row in found if row["kind"] == "activation"} == set(range(microbatches))
        assert {"activation", "gradient", "parameter", "grad_reduced"} <= {row["kind"] for row in found}
        unknown = {(row["name"], row["shard"]) for row in found if row["shard"].startswith("?")}
        # A latent, as the pages say: what MindSpeed-LLM makes it with, and its norm, which is not one of heads.
        known = ("k_layernorm", "kv_layernorm")
        wrong = {name for name, why in unknown if not name.endswith(known) and "LinearNoTP" not in why}
        assert wrong <= {"lm loss"}, unknown
    assert [finding.text for finding in diagnose(open_run(out)).findings] == []
