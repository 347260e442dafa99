"""Installs two source trees as one package: ``msprobe_megatron/`` and, as ``msprobe_megatron.patches``, ``patches/``.

The Megatron patches live at the top of the tree, where a reader looks for them; everything else about the
project is declared in pyproject.toml.
"""

from setuptools import find_packages, setup

_PACKAGES = find_packages(include=["msprobe_megatron", "msprobe_megatron.*"])

setup(
    packages=[*_PACKAGES, "msprobe_megatron.patches"],
    package_dir={"msprobe_megatron": "msprobe_megatron", "msprobe_megatron.patches": "patches"},
    package_data={
        "msprobe_megatron.native": ["*.cpp", "*.h"],
        "msprobe_megatron.report.html": ["assets/*"],
        # Not packages of ours: on no path, and found only by a rehearsal.
        "msprobe_megatron.rehearsal": ["stand_ins/**/*.py", "stand_ins/*/METADATA"],
    },
)
