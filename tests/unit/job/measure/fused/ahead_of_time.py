"""Compiles the fused kernel for a target that need not be there, and prints what the compiler made of it as JSON.

Run by test_kernel.py in a process of its own: python -m tests.unit.job.measure.fused.ahead_of_time cuda 90 32
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from msprobe_megatron.job.measure.fused import kernel, launch

KINDS = {"float32": (0, 4), "bfloat16": (2, 2), "float16": (3, 2), "float64": (1, 8), "int64": (4, 8), "float8": (7, 1)}
DETAILS = {"statistics": (False, 0), "digest": (True, 0), "sketch": (True, 64)}


def compiled(function, target, **constants):
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else "i64" for name in names}
    source = ASTSource(function, signature, {(names.index(name),): value for name, value in constants.items()})
    return triton.compile(source, target=target, options={"num_warps": 4, "enable_fp_fusion": False})


def nvidia_facts(found):
    """Registers and local memory from the cubin, loads from the PTX."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, _, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage).groups())
    loads = re.findall(r"ld\.global\.(v\d)\.b(\d+)", found.asm["ptx"])
    widest = max((int(count[1:]) * int(bits) // 8 for count, bits in loads), default=0)
    return {"registers": registers, "spilled": stack + local, "widest": widest, "float_atomics": 0}


def amd_facts(found):
    text = found.asm["amdgcn"]
    fact = {name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count")}
    scratch = int(re.search(r"ScratchSize: (\d+)", text)[1])
    loads = re.findall(r"(?:global|buffer)_load_dwordx(\d)", text)
    widest = max((int(count) * 4 for count in loads), default=0)
    return {
        "registers": fact["vgpr_count"],
        "spilled": fact["vgpr_spill_count"] + scratch,
        "widest": widest,
        "float_atomics": len(re.findall(r"atomic_(?:pk_)?(?:add|min|max)_f", text)),
    }


def main(backend, arch, warp):
    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp))
    facts_of = nvidia_facts if backend == "cuda" else amd_facts
    facts = {}
    for name, (kind, width) in KINDS.items():
        rows, vector = launch.shape_of_block(width)
        common = {"KIND": kind, "WIDTH": width, "WIDE": True, "ALIGNED": True, "ROWS": rows, "VECTOR": vector}
        for detail, (numbered, cells) in DETAILS.items():
            more = {"NUMBERED": numbered, "CELLS": cells, "STRIDED": False}
            found = compiled(kernel.measure_tensor, target, **common, **more)
            facts[f"{name} {detail}"] = facts_of(found)
            if backend == "cuda":
                facts[f"{name} {detail}"]["float_atomics"] = len(
                    re.findall(r"(?:atom|red)\.[\w.:]*\.[bf]?f(?:16|32|64)", found.asm["ptx"])
                )
        facts[f"{name} many"] = facts_of(compiled(kernel.measure_many, target, **common))
    rows, columns = launch.shape_of_block(2, strided=True)
    shape = {"KIND": 2, "WIDTH": 2, "WIDE": True, "ALIGNED": False, "ROWS": rows, "VECTOR": columns}
    for detail, (numbered, cells) in DETAILS.items():
        more = {"NUMBERED": numbered, "CELLS": cells, "STRIDED": True}
        facts[f"strided {detail}"] = facts_of(compiled(kernel.measure_tensor, target, **shape, **more))
    print(json.dumps(facts))


main(*sys.argv[1:])
