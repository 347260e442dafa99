"""Installs four source trees as one package: ``msprobe_megatron/``, below it ``patches/``, ``scripts/`` and ``docs/``.

The Megatron patches, the launch scripts with their overlays, and the manual live at the top of the tree, where a reader
looks for them, and are part of the wheel; everything else about the project is declared in pyproject.toml.
"""

from setuptools import find_packages, setup

_PACKAGES = find_packages(include=["msprobe_megatron", "msprobe_megatron.*"])
_BESIDE = ("patches", "scripts", "docs")

setup(
    packages=[*_PACKAGES, *(f"msprobe_megatron.{name}" for name in _BESIDE)],
    package_dir={"msprobe_megatron": "msprobe_megatron", **{f"msprobe_megatron.{name}": name for name in _BESIDE}},
    include_package_data=False,
    package_data={
        "msprobe_megatron.job.measure.native": ["kernel/*.cpp", "kernel/*.h"],
        "msprobe_megatron.job.sites.compiled": ["*.cpp", "*.h"],
        "msprobe_megatron.hosts.rehearsal.simulated_device": ["extension/*.cpp", "extension/*.h"],
        "msprobe_megatron.report.html": ["assets/*"],
        "msprobe_megatron.analysis.align": ["maps/*.yaml"],
        # Not packages of ours: on no path, and found only by a rehearsal.
        "msprobe_megatron.hosts.rehearsal": ["stand_ins/**/*.py", "stand_ins/*/METADATA"],
        # A folder on the package's own path, no package itself.
        "msprobe_megatron.cli": ["import_paths/**/*.py"],
        "msprobe_megatron.patches": ["source/*"],
        # What a user of the wheel needs; the scripts of the checkout itself stay there.
        "msprobe_megatron.scripts": [
            *("msprobe_run.sh", "msprobe_env.sh", "quickstart_probe.yaml"),
            *("recipes/*/*.yaml", "shims/*", "examples/*.py"),
        ],
        "msprobe_megatron.docs": ["*.md", "hosts/*.md", "images/*"],
    },
)
