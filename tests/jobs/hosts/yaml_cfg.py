"""Writes the file that Megatron-LM's own `--yaml-cfg` reads, from its own parser: every flag with its value.

    python tests/jobs/hosts/yaml_cfg.py OUT.yaml --num-layers 2 …        with a checkout on PYTHONPATH

Fields of the model's and the parallel configuration stand in sections; those that Megatron's check reads at the top
cannot stand in a section too.

    python tests/jobs/hosts/yaml_cfg.py --refused FILE.yaml…

prints what Megatron says to such files by itself: no line of the kit is imported.
"""

import dataclasses
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import yaml

PLAIN = (int, float, str, bool, type(None))


def plain(value):
    if type(value) in (list, tuple):
        return [plain(item) for item in value]
    return value if type(value) in PLAIN else None


def section(cls, name, values, source):
    """The fields of a configuration that are not read at the top."""
    found = {}
    for item in dataclasses.fields(cls):
        at_top = item.name in values and re.search(rf"args\.{item.name}\b", source)
        if not at_top or f"args.{name}.{item.name}" in source:
            default = None if item.default is dataclasses.MISSING else item.default
            found[item.name] = values.get(item.name, plain(default))
    return found


def main(out, flags):
    from msprobe_megatron.job.devices import megatron_on_cpu

    megatron_on_cpu.install()
    sys.argv = ["pretrain_gpt.py", *flags]
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training import arguments, yaml_arguments

    values = {name: plain(value) for name, value in vars(arguments.parse_args()).items() if name != "yaml_cfg"}
    source = inspect.getsource(yaml_arguments.validate_yaml)
    parallel = section(ModelParallelConfig, "model_parallel", values, source)
    model = section(TransformerConfig, "language_model", values, source)
    own = {item.name for item in dataclasses.fields(ModelParallelConfig)}
    model = {name: value for name, value in model.items() if name not in own}
    # What Megatron's check of its command line makes of them, and its check of such a file does not.
    model |= {"activation_func": "gelu", "apply_rope_fusion": False, "cp_comm_type": None}
    values |= {"skipped_train_samples": 0}
    rest = {name: value for name, value in values.items() if name not in model and name not in parallel}
    with open(out, "w") as file:
        yaml.safe_dump({"language_model": model, "model_parallel": parallel, **rest}, file)


def refused(path):
    """The words of Megatron's own check and of its model's configuration; nothing if both take the file."""
    # The file alone: the package asks for a GPU's packages.
    place = Path("megatron/training/yaml_arguments.py")
    spec = importlib.util.spec_from_file_location("yaml_arguments", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    arguments = module.load_yaml(path)
    arguments.rank, arguments.world_size = 0, 1
    try:
        module.core_transformer_config_from_yaml(module.validate_yaml(arguments))
    except Exception as error:
        return str(error)
    return ""


if __name__ == "__main__":
    if sys.argv[1] == "--refused":
        for path in sys.argv[2:]:
            print("refused:", refused(path))
        print("kit:", any(name.startswith("msprobe_megatron") for name in sys.modules))
    else:
        main(sys.argv[1], sys.argv[2:])
