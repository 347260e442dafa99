"""The stand-ins: importable in a rehearsal only, behind what is installed, and part of every installation."""

import subprocess
import sys
from pathlib import Path

import pytest

from msprobe_megatron.hosts.rehearsal.finding import APEX, NPU, STAND_INS, TRANSFORMER_ENGINE, needed_by

ROOT = Path(__file__).resolve().parents[4]
OFFER = f"from msprobe_megatron.hosts.rehearsal.finding import offer; offer({(*NPU, *APEX, *TRANSFORMER_ENGINE)}); "


def python(code, cwd):
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", [*NPU, *APEX, *TRANSFORMER_ENGINE])
def test_no_job_but_a_rehearsal_can_import_them(tmp_path, name):
    code = f"import importlib.util as u, msprobe_megatron.hosts.rehearsal; print(u.find_spec({name!r}) is None)"
    assert python(code, tmp_path).stdout == "True\n"
    done = python(f"{OFFER}import importlib.util as u; print(u.find_spec({name!r}).origin)", tmp_path)
    assert done.stdout.startswith(str(STAND_INS)), done.stderr


def test_what_is_installed_comes_first(tmp_path):
    (tmp_path / "acl.py").write_text("def get_soc_name():\n    return 'real'\n")
    assert python(f"{OFFER}import acl; print(acl.get_soc_name())", tmp_path).stdout == "real\n"


def test_only_what_a_host_needs_is_offered(tmp_path):
    offer = f"from msprobe_megatron.hosts.rehearsal.finding import offer; offer({NPU}); "
    assert python(f"{offer}import acl; print(acl.get_soc_name())", tmp_path).stdout == "stand-in\n"
    assert "No module named 'apex'" in python(f"{offer}import apex", tmp_path).stderr
    version = "from importlib.metadata import version; version('transformer-engine')"
    assert "PackageNotFoundError" in python(offer + version, tmp_path).stderr


def test_the_version_an_old_release_asks_for(tmp_path):
    code = "from importlib.metadata import version; print(version('transformer-engine'), version('numpy') > '1')"
    assert python(OFFER + code, tmp_path).stdout == "1.0.0 True\n"
    assert "PackageNotFoundError" in python(code, tmp_path).stderr


def test_an_operator_without_stand_in_is_named(tmp_path):
    code = "import torch_npu; print(hasattr(torch_npu, 'npu_swiglu'), hasattr(torch_npu, 'npu_grouped_matmul'))"
    done = python(f"{OFFER}{code}; torch_npu.npu_grouped_matmul", tmp_path)
    assert done.stdout == "True False\n"
    assert "torch_npu.npu_grouped_matmul: nothing stands in for it in a rehearsal" in done.stderr


@pytest.mark.parametrize(
    ("parts", "version", "expected"),
    [
        (["modellink"], "0.6", (*NPU, *APEX, *TRANSFORMER_ENGINE)),
        (["mindspeed_llm"], "0.12", (*NPU, *APEX)),
        ([], "0.7", (*NPU, *APEX, *TRANSFORMER_ENGINE)),
        # A newer one would build on parts that a stand-in of TransformerEngine does not have.
        ([], "0.8", NPU),
        ([], None, NPU),
    ],
)
def test_who_is_offered_what(tmp_path, parts, version, expected):
    for part in parts:
        (tmp_path / part).mkdir()
    if version:
        (tmp_path / "megatron/core").mkdir(parents=True)
        major, minor = version.split(".")
        (tmp_path / "megatron/core/package_info.py").write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = 0\n")
    assert needed_by(tmp_path) == expected


def test_an_installation_has_all_of_them(tmp_path):
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path), "build_py", "-d", str(tmp_path / "built")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    built = tmp_path / "built/msprobe_megatron/hosts/rehearsal/stand_ins"
    there = {path.relative_to(STAND_INS) for path in STAND_INS.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert len(there) > 15
    assert not [path for path in there if not (built / path).is_file()]
