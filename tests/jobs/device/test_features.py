"""Single features on a device, in a loop of plain torch that never waits: the defects that were found there."""

import hashlib
import json
import zlib

import pytest
import torch

from msprobe_megatron.hosts.rehearsal.simulated_device import GAPS
from tests.jobs.device.plain import loop
from tests.jobs.integrations.rows import rows

PERTURB = {"perturb": {"stage": "forward", "budget": "all"}}
NO_CHANGE = {"perturb": {"stage": "forward", "mode": "no_change", "budget": "all", "modules": ["middle"]}}
MONITOR = {"monitor": {"every": 1, "alerts": ["nonfinite", "spike"]}}


@pytest.fixture
def run(device, tmp_path):
    """Runs the loop with a probe and without; the two results."""

    def both(probe, kind="plain", gaps=()):
        [plain] = device.run(loop, str(tmp_path / "none"), None, kind)
        [probed] = device.run(loop, str(tmp_path / "out"), probe, kind, {}, gaps)
        return plain, probed

    return both


def same(plain, probed):
    pairs = [(plain["loss"], probed["loss"])]
    pairs += [pair for what in ("parameters", "rng") for pair in zip(plain[what], probed[what], strict=True)]
    return all(torch.equal(left, right) for left, right in pairs)


def test_the_loop_itself_never_waits(device, tmp_path):
    [plain] = device.run(loop, str(tmp_path / "none"), None)
    assert plain["waits"] == []


def test_perturb_leaves_the_generator_of_the_device_alone(run):
    """An operator that draws from it without saying so is refused, as on the host."""
    plain, probed = run(NO_CHANGE, "noisy")
    assert same(plain, probed)
    ledger = json.loads(probed["ledger"])["perturb"]
    assert "random" in json.dumps(ledger)
    assert "nondeterministic" not in json.dumps(ledger.get("verdicts", {}))


def test_a_host_tensor_is_measured_with_digest_and_sketch(run, tmp_path):
    plain, probed = run({"dump": {"level": "L0", "digest": True, "sketch": 16}}, "host_tensor")
    assert same(plain, probed)
    assert probed["waits"] == []
    [row] = [row for row in rows(tmp_path / "out", 2) if (row["name"], row["path"]) == ("middle", "table")]
    assert (row["sum"], row["sumsq"], row["max"], row["n_zero"]) == (28.0, 140.0, 7.0, 1)
    assert row["digest"]
    assert any(row["sketch"])


@pytest.mark.parametrize("digest", ["md5", "crc32"])
def test_hashes_are_those_of_the_bytes_and_nobody_waits_for_them(run, tmp_path, digest):
    plain, probed = run({"dump": {"level": "L0", "digest": digest}}, "host_tensor")
    assert same(plain, probed)
    assert probed["waits"] == []
    inputs = {"first": torch.linspace(-1, 1, 32), "middle": torch.arange(8.0)}
    for name, x in inputs.items():
        raw = x.numpy().tobytes()
        want = hashlib.md5(raw).hexdigest() if digest == "md5" else f"{zlib.crc32(raw):08x}"
        path = "input" if name == "first" else "table"
        [row] = [
            row for row in rows(tmp_path / "out", 2) if (row["name"], row["path"], row["io"]) == (name, path, "input")
        ]
        assert json.loads(row["extra"])[digest] == want


def test_the_ledger_names_no_kernel_of_the_host(run):
    _, probed = run({"dump": {"level": "L0"}})
    assert '"kernel": "registered"' in probed["ledger"]
    assert "avx" not in probed["ledger"]
    assert '"look": "compiled"' in probed["ledger"]


@pytest.mark.parametrize("probe", [MONITOR, PERTURB, {"perturb": {"stage": "backward", "budget": "all"}}])
def test_the_host_never_waits(run, probe):
    plain, probed = run(probe)
    assert same(plain, probed)
    assert probed["waits"] == []


def test_gradients_are_one_launch_and_so_are_moments(run):
    _, probed = run({"monitor": {"every": 1, "activations": False}})
    assert probed["together"] == 2


DUMP = {"dump": {"level": "mix", "digest": True, "sketch": 16}}


@pytest.mark.parametrize("gap", [*GAPS, "all"])
@pytest.mark.parametrize("probe", [DUMP, MONITOR, PERTURB], ids=["dump", "monitor", "perturb"])
def test_what_the_device_lacks_stops_nothing(run, tmp_path, probe, gap):
    """Training is the same, no feature is disabled; what perturb cannot compute again it says."""
    plain, probed = run(probe, gaps=list(GAPS) if gap == "all" else [gap])
    assert same(plain, probed)
    ledger = json.loads(probed["ledger"])
    assert ledger["faults"] == []
    if probe is DUMP:
        assert all(row["n_nan"] == 0 and row["digest"] for row in rows(tmp_path / "out", 2) if row["numel"])
    if probe is PERTURB and gap == "float64_matmul":
        assert "gap" in json.dumps(ledger["perturb"]["could_not_run"])
