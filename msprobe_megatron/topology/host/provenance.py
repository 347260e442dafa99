"""Provenance of a job: the environment variables that training libraries read, and the sources it has imported.

Written once to run.json, for `env-diff`. Only reads files: no subprocess is started in a job.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Prefixes of variables that can change a result or a kernel. No others are recorded: an environment may hold anything.
_READ = re.compile(
    r"(CUDA|CUDNN|CUBLAS|CUTLASS|NCCL|NVTE|NVIDIA_TF32|TE|TORCH|PYTORCH|TORCHINDUCTOR|TRITON|OMP|MKL|KMP|OPENBLAS|GLOO|UCX"
    r"|HCCL|LCCL|ASCEND|NPU|CANN|ACL|TASK_QUEUE|COMBINED|MINDSPEED|MEGATRON|MSPROBE|FLASH|XLA|HIP|ROCM|MIOPEN|RCCL"
    r"|PYTHONHASHSEED|PYTHONPATH|LD_LIBRARY_PATH|LD_PRELOAD|MASTER|WORLD_SIZE|NODE_RANK|NNODES)(_|\b|[A-Z])"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|PRIVATE|SIGNATURE", re.IGNORECASE)
_LONGEST = 2000
_LARGEST_SOURCE = 8 << 20


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that training libraries read, without those whose names suggest a secret.

    Example::

        >>> environment({"NCCL_ALGO": "Ring", "HOME": "/root", "NCCL_AUTH_TOKEN": "x"})
        {'NCCL_ALGO': 'Ring'}
    """
    found = os.environ if variables is None else variables
    return {
        name: value[:_LONGEST]
        for name, value in sorted(found.items())
        if _READ.match(name) and not _SECRET.search(name) and not _SECRET.search(_scheme(value))
    }


def _scheme(value: str) -> str:
    """A value such as https://user:password@host carries a secret, whatever the variable is called."""
    return "PASS" if re.search(r"://[^/\s]*:[^/\s]*@", value) else ""


def sources() -> dict[str, dict[str, Any]]:
    """The checkouts that modules of this process were imported from: commit, number of files, digest of their text.

    An uncommitted change shows in the digest. Installed packages are identified by their versions instead.
    """
    by_root: dict[Path, list[Path]] = defaultdict(list)
    roots: dict[Path, Path | None] = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and "site-packages" not in file:
            path = Path(file)
            root = _checkout(path.parent, roots)
            if root is not None:
                by_root[root].append(path)
    return {str(root): _state(root, files) for root, files in sorted(by_root.items())}


def _checkout(directory: Path, known: dict[Path, Path | None]) -> Path | None:
    if directory not in known:
        if (directory / ".git").exists():
            known[directory] = directory
        else:
            known[directory] = None if directory == directory.parent else _checkout(directory.parent, known)
    return known[directory]


def _state(root: Path, files: list[Path]) -> dict[str, Any]:
    digest, count = hashlib.sha256(), 0
    for path in sorted(set(files)):
        try:
            if path.stat().st_size <= _LARGEST_SOURCE:
                digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
                count += 1
        except (OSError, ValueError):
            continue
    return {"commit": _commit(root), "files": count, "digest": digest.hexdigest()[:16]}


def _commit(root: Path) -> str:
    """The commit of HEAD, read from the files of the repository; empty if it cannot be determined."""
    try:
        git = root / ".git"
        if git.is_file():  # a worktree or a submodule
            git = root / git.read_text(encoding="utf-8").partition("gitdir:")[2].strip()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref:"):
            return head[:40]
        name = head.partition("ref:")[2].strip()
        common = git / "commondir"
        if common.is_file():
            git = git / common.read_text(encoding="utf-8").strip()
        loose = git / name
        if loose.is_file():
            return loose.read_text(encoding="utf-8").strip()[:40]
        packed = (git / "packed-refs").read_text(encoding="utf-8").splitlines()
        return next((line.split()[0][:40] for line in packed if line.endswith(f" {name}")), "")
    except (OSError, ValueError, IndexError):
        return ""
