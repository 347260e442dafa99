"""Shared by the tests of the probe file: text in, configuration or the one-line refusal out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msprobe_megatron.config import ConfigError, ProbeConfig, load


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ProbeConfig]:
    """Write a probe file and load it."""
    monkeypatch.chdir(tmp_path)

    def read(text: str, name: str = "probe.yaml", **options: Any) -> ProbeConfig:
        Path(name).write_text(text, encoding="utf-8")
        return load(name, **options)

    return read


@pytest.fixture
def refused(probe: Callable[..., ProbeConfig]) -> Callable[..., str]:
    """Return the text of the refusal, which must be one line that begins with the file's name."""

    def read(text: str, name: str = "probe.yaml", **options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            probe(text, name, **options)
        message = str(caught.value)
        assert len(message.splitlines()) == 1
        assert message.startswith(f"{name}: ")
        return message

    return read
