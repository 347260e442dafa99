"""Building the kernel once for each user, machine level and compiler, into a private cache.

A library found in the cache is only loaded if no other user could have written it. Several ranks may start at once:
one builds, the others wait for it a while; whatever happens, what appears under the final name is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import secrets
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from msprobe_megatron.job.measure.native.levels import Level

SOURCE = Path(__file__).parent / "kernel" / "api.cpp"
_PARTS = ("vectors.h", "stats.h", "digest.h", "pair.h")
_COMPILERS = ("c++", "g++", "clang++")
# -ffp-contract=off: a fused multiply-add rounds differently, and levels must agree to the bit.
_FLAGS = ("-std=c++14", "-O3", "-shared", "-fPIC", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-w")


class BuildError(Exception):
    """No library could be made; the text says why."""


class Announcing:
    """Reports, once, that something has to be built: a job should not stand still for ten seconds without a message."""

    tell: Callable[[str], None] | None = None


class Recipe(NamedTuple):
    """What to build: the name of the library, its source, the flags of the compiler, and what it is linked with.

    ``parts`` are the files beside the source that it includes.
    """

    name: str
    source: Path
    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    parts: tuple[str, ...] = ()


def _kernel() -> Recipe:
    return Recipe("kernel", SOURCE, _FLAGS, ("-lm",), _PARTS)


def cache_directory() -> Path:
    """The private directory of built libraries: ``$MSPROBE_CACHE``, else below ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    named = os.environ.get("MSPROBE_CACHE")
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "msprobe_megatron"


def built(level: Level, timeout: float, recipe: Recipe | None = None) -> Path:
    """The library of a level, from the cache or built now within ``timeout`` seconds; raises `BuildError`.

    Without a ``recipe`` it is the kernel.
    """
    deadline = time.monotonic() + timeout
    compiler = next((found for name in _compilers() if (found := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler among {', '.join(_compilers())}")
    folder = _private(cache_directory())
    recipe = recipe or _kernel()
    path = folder / f"{recipe.name}_{level.name}_{_fingerprint(compiler, level, deadline, recipe)}.so"
    if _trusted(path):
        return path
    tell, Announcing.tell = Announcing.tell, None
    if tell is not None:
        tell(
            f"building its compiled part into {folder}, once for this user, compiler and torch: up to some ten seconds"
        )
    with _alone(folder / f"{path.stem}.lock", deadline):
        if not _trusted(path):
            _compile(compiler, level, path, deadline, recipe)
    if not _trusted(path):
        raise BuildError(f"{path}: not a file of this user alone")
    return path


def _compilers() -> tuple[str, ...]:
    named = os.environ.get("CXX", "").split()
    return (named[0],) if named else _COMPILERS


def _fingerprint(compiler: str, level: Level, deadline: float, recipe: Recipe) -> str:
    try:
        version = subprocess.run(
            [compiler, "--version"], capture_output=True, timeout=_left(deadline), check=True, stdin=subprocess.DEVNULL
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler}: {error}") from error
    flags = " ".join((*recipe.flags, *level.flags))
    texts = [path.read_bytes() for path in (recipe.source, *map(recipe.source.with_name, recipe.parts))]
    seed = (*texts, version, flags.encode(), platform.machine().encode())
    return hashlib.sha256(b"\0".join(seed)).hexdigest()[:24]


def _compile(compiler: str, level: Level, path: Path, deadline: float, recipe: Recipe) -> None:
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(6)}.tmp")
    flags = (*recipe.flags, *level.flags)
    command = [compiler, *flags, "-o", str(temporary), str(recipe.source), *recipe.libraries]
    try:
        subprocess.run(command, capture_output=True, timeout=_left(deadline), check=True, stdin=subprocess.DEVNULL)
        os.chmod(temporary, 0o700)
        os.rename(temporary, path)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode("utf-8", "replace").strip().splitlines() or ["no message"]
        raise BuildError(f"{compiler} failed: {lines[0]}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _private(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.stat(folder, follow_symlinks=False)
    except OSError as error:
        raise BuildError(f"{folder}: {error.strerror or error}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise BuildError(f"{folder}: must be a directory of this user with mode 0700")
    return folder


def _trusted(path: Path) -> bool:
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


@contextlib.contextmanager
def _alone(path: Path, deadline: float) -> Iterator[None]:
    """Hold the lock of a build. A file system without locks means that several ranks build the same: harmless."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError("another process is still building it") from None
                time.sleep(0.05)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())
