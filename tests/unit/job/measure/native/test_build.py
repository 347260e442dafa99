"""The kernel's way into a process: built once, private, refused when others could have written it, never needed."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from msprobe_megatron.job.measure.native import build
from msprobe_megatron.job.measure.native.build import BuildError, built
from msprobe_megatron.job.measure.native.levels import levels
from msprobe_megatron.job.measure.native.library import open_library

needs_compiler = pytest.mark.skipif(
    not any(build.shutil.which(name) for name in ("c++", "g++", "clang++")), reason="no compiler"
)
PLAIN = levels()[-1]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MSPROBE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@needs_compiler
def test_built_once_private_and_found_again(cache, monkeypatch):
    path = built(PLAIN, 60.0)
    assert path.parent == cache and cache.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o077 == 0
    assert open_library(str(path), "plain").level == "plain"
    monkeypatch.setattr(build, "_compile", lambda *args: pytest.fail("built twice"))
    assert built(PLAIN, 60.0) == path
    assert not [name for name in os.listdir(cache) if name.endswith(".tmp")]


@needs_compiler
def test_a_job_that_has_to_build_says_so_once(tmp_path):
    """In processes of their own: the first builds both libraries, the second finds them."""
    code = (
        "from msprobe_megatron.job.measure import native; from msprobe_megatron.job.sites.compiled import loader\n"
        "native.load(tell=lambda text: print('told', text)); loader.load()\n"
        "print(native.kernel() is not None, loader.module() is not None, loader.why_not())"
    )
    env = {**os.environ, "MSPROBE_CACHE": str(tmp_path / "cache"), "MSPROBE_NATIVE": "1"}
    first, second = (
        subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert first.count("told") == 1 and str(tmp_path / "cache") in first
    assert second == first.splitlines(keepends=True)[-1]
    assert second.startswith("True")


@needs_compiler
@pytest.mark.parametrize("part", sorted(path.name for path in build.SOURCE.parent.iterdir()))
def test_another_source_is_another_library(cache, monkeypatch, tmp_path, part):
    """Whichever file of the kernel changes: a library of a part that the fingerprint leaves out would be used stale."""
    monkeypatch.setattr(build, "_compile", lambda compiler, level, path, *_: path.touch(0o700))
    path = built(PLAIN, 60.0)
    changed = tmp_path / "kernel"
    shutil.copytree(build.SOURCE.parent, changed)
    with open(changed / part, "ab") as file:
        file.write(b"// changed\n")
    monkeypatch.setattr(build, "SOURCE", changed / build.SOURCE.name)
    assert built(PLAIN, 60.0) != path


@needs_compiler
def test_several_ranks_at_once_share_one_build(cache, monkeypatch):
    calls, compile_once = [], build._compile
    monkeypatch.setattr(build, "_compile", lambda *args: (calls.append(1), compile_once(*args)))
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: built(PLAIN, 60.0), range(4)))
    assert len(paths) == 1 and len(calls) == 1


@needs_compiler
def test_what_others_may_write_is_not_trusted(cache):
    path = built(PLAIN, 60.0)
    path.chmod(0o722)
    assert not build._trusted(path)
    cache.chmod(0o755)
    with pytest.raises(BuildError, match="mode 0700"):
        built(PLAIN, 60.0)


def test_a_link_in_place_of_the_cache_is_refused(cache, tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    cache.symlink_to(tmp_path / "real")
    with pytest.raises(BuildError):
        built(PLAIN, 60.0)


def test_no_compiler(cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler among no-such-compiler"):
        built(PLAIN, 60.0)


def test_a_compiler_that_fails_or_hangs(cache, monkeypatch, tmp_path):
    for body, message in (("exit 3", "version|exit status"), ("sleep 60", "timed out")):
        compiler = tmp_path / "cxx"
        compiler.write_text(f"#!/bin/sh\n{body}\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        with pytest.raises(BuildError, match=message):
            built(PLAIN, 1.0)


@pytest.mark.parametrize(("setting", "reason"), [("MSPROBE_NATIVE=0", "MSPROBE_NATIVE=0"), ("CXX=nothing", "nothing")])
def test_without_a_kernel_the_torch_twin_measures(setting, reason):
    """In a process of its own, because the attempt is made once a process."""
    code = """
import torch
from msprobe_megatron.job.measure import native
from msprobe_megatron.job.measure.measurer import Measurer
from msprobe_megatron.job.record.slots import SlotTable
assert native.load() is None
table = SlotTable(torch.device("cpu"), digest=True)
measurer = Measurer(table, digest=True)
slot = table.take()
assert measurer(torch.arange(5.0), slot)
floats, counts = (sealed := table.seal()).wait()
print(floats[0].tolist(), counts[0].tolist(), sealed.numbered()[0][0], measurer.kernel)
"""
    key, _, value = setting.partition("=")
    environment = {**os.environ, key: value, "MSPROBE_CACHE": os.devnull + "/x"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.startswith("[0.0, 4.0, 10.0, 30.0, 4.0] [0, 0, 0, 1] ")
    assert f"torch: {reason}" in done.stdout or reason in done.stdout


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"}, ["avx512", "avx2", "plain"]),
        ("x86_64", {"avx2", "fma", "avx512f"}, ["avx2", "plain"]),
        ("x86_64", {"sse2"}, ["plain"]),
        ("aarch64", {"avx2", "fma"}, ["plain"]),
    ],
)
def test_levels_follow_the_machine(machine, flags, expected):
    assert [level.name for level in levels(machine, frozenset(flags))] == expected
