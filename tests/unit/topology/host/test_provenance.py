"""Environment and sources of a job: what can change numbers is kept, what may be a secret is not."""

import sys
import types

from msprobe_megatron.topology.host.provenance import environment, sources


def test_secrets_and_strangers_stay_out():
    variables = {
        "NCCL_ALGO": "Ring",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": "1",
        "HCCL_DETERMINISTIC": "true",
        "NVTE_FLASH_ATTN": "1",
        # none of these
        "HOME": "/home/me",
        "WANDB_API_KEY": "s3cret",
        "TORCH_HUB_TOKEN": "s3cret",
        "NCCL_PASSWORD": "s3cret",
        "TORCH_PROXY": "https://me:s3cret@proxy",
        "DATABASE_URL": "s3cret",
        "AWS_SECRET_ACCESS_KEY": "s3cret",
    }
    found = environment(variables)
    assert set(found) == {
        *("NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS", "HCCL_DETERMINISTIC", "NVTE_FLASH_ATTN"),
    }
    assert "s3cret" not in str(found)


def _module(path, text, monkeypatch, name):
    path.write_text(text)
    module = types.ModuleType(name)
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, name, module)


def test_the_text_of_imported_modules_decides(tmp_path, monkeypatch):
    root = tmp_path / "Megatron-LM"
    (root / ".git" / "refs" / "heads").mkdir(parents=True)
    (root / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (root / ".git" / "refs" / "heads" / "main").write_text("a" * 40 + "\n")
    (root / "unused.py").write_text("x = 1")
    _module(root / "used.py", "x = 1", monkeypatch, "msprobe_test_used")
    before = sources()[str(root)]
    assert (before["commit"], before["files"]) == ("a" * 40, 1)
    (root / "unused.py").write_text("x = 2")
    assert sources()[str(root)] == before
    (root / "used.py").write_text("x = 2")
    after = sources()[str(root)]
    assert after["digest"] != before["digest"]
    assert after["commit"] == before["commit"]


def test_packed_references_and_detached_heads(tmp_path, monkeypatch):
    root = tmp_path / "repo"
    (root / ".git").mkdir(parents=True)
    _module(root / "m.py", "", monkeypatch, "msprobe_test_m")
    (root / ".git" / "HEAD").write_text("b" * 40)
    assert sources()[str(root)]["commit"] == "b" * 40
    (root / ".git" / "HEAD").write_text("ref: refs/heads/x")
    (root / ".git" / "packed-refs").write_text("# pack-refs\n" + "c" * 40 + " refs/heads/x\n")
    assert sources()[str(root)]["commit"] == "c" * 40
    (root / ".git" / "packed-refs").unlink()
    assert sources()[str(root)]["commit"] == ""
