"""Programs that XLA's CUDA compiler makes for a GPU that is only described, and what is in them.

The counts are exact and repeat. gpu_structure.py, region_cost.py, collective_cost.py and
autocast_memory.py are made of this.
"""

import collections
import functools
import importlib.util
import math
import os
import pathlib
import re
import sys
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

BYTES = dict(
    pred=1, s8=1, u8=1, f16=2, bf16=2, s16=2, u16=2, s32=4, u32=4, f32=4, s64=8, u64=8, f64=8
)
KERNELS = ("fusion", "custom-call", "dot", "copy", "reduce", "conditional", "while")
COLLECTIVES = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"


def plugin_library() -> pathlib.Path | None:
    """The CUDA plugin's shared library, or None where it is not installed."""
    spec = importlib.util.find_spec("jax_plugins")
    for folder in spec.submodule_search_locations if spec else ():
        for library in pathlib.Path(folder).glob("xla_cuda*/xla_cuda_plugin.so"):
            return library
    return None


@functools.cache
def described_devices(gpu: str, topology: str = "1x1x1"):
    """Compile-only devices. The descriptions of the common GPUs are text inside the plugin."""
    library = plugin_library()
    if library is None:
        sys.exit("The CUDA compiler is not installed: pip install '.[gpu-program]'.")
    texts = re.findall(rb"# Copyright 20\d\d The OpenXLA[^\x00]*", library.read_bytes())
    named = re.compile(rf'device_description_str: "[^"]*{gpu}[^"]*"')
    fitting = [t for t in map(bytes.decode, texts) if named.search(t) and "MIG" not in t]
    if not fitting:
        sys.exit(f"This plugin describes no {gpu}: it needs jax 0.12 or newer.")
    make = lambda: topologies.get_topology_desc(
        platform="cuda", topology=topology, target_config=fitting[0]
    )
    try:
        return make().devices
    except Exception:
        # JAX does not offer a plugin that found no cuDNN; compiling needs none.
        from jax._src import xla_bridge

        xla_bridge.register_plugin("cuda", priority=500, library_path=str(library), options=None)
        return make().devices


def described_device(gpu: str):
    return described_devices(gpu)[0]


def figures(fun, *args, gpu: str = "H200", **options) -> dict[str, Any]:
    """What `count` says of `fun`, compiled for a GPU, and what it needs of memory.

    In MB the memory for what is temporary; in bytes, how much of the arguments becomes results in
    place. Arguments that have a sharding keep it.
    """
    own = SingleDeviceSharding(described_device(gpu))
    placed = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding or own)
    compiled = jax.jit(fun, **options).lower(*jax.tree.map(placed, args)).compile()
    memory = compiled.memory_analysis()
    return {
        **count(compiled.as_text()),
        "temp": memory.temp_size_in_bytes / 1e6,
        "in place": memory.alias_size_in_bytes,
    }


class Instruction(NamedTuple):
    name: str
    shapes: str
    operation: str
    operands: list[str]
    attributes: str

    @property
    def size(self) -> int:
        """Bytes of the result."""
        return sum(
            BYTES[dtype] * math.prod(int(d) for d in dims.split(",") if d)
            for dtype, dims in re.findall(r"\b(pred|[sufb]+\d+)\[([\d,]*)\]", self.shapes)
        )

    def attribute(self, pattern: str) -> str:
        """What the group in `pattern` matches, or nothing."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""


def parse(program: str) -> dict[str, list[Instruction]]:
    """The instructions of each computation; the entry computation is called ENTRY."""
    computations: dict[str, list[Instruction]] = {}
    instruction = r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(?:,(.*)|$)"
    for line in program.splitlines():
        if header := re.match(r"(ENTRY |)%?([\w.\-]+) \(.*{$", line):
            body = computations.setdefault(header[1].strip() or header[2], [])
        elif found := re.match(instruction, line):
            name, shapes, operation, operands, attributes = found.groups(default="")
            operands = re.findall(r"%([\w.\-]+)", operands)
            body.append(Instruction(name, shapes, operation, operands, attributes))
    return computations


def moved(kernel: list[Instruction], operands: list[Instruction], known) -> int:
    """Bytes read and written. Of what is only sliced, or updated in place, that is the slice."""
    total = kernel[-1].size + sum(x.size for x in operands)
    whole = set()
    for i in kernel:
        if i.operation == "dynamic-slice":
            total += i.size
        elif i.operation == "dynamic-update-slice":
            total += known[i.operands[1]].size - i.size
        else:
            continue
        whole.add(i.operands[0])
    return total - sum(known[x].size for x in whole)


def count(program: str) -> dict[str, Any]:
    """Kernels, the bytes they read and write in MB, collectives, and products by operands' dtype.

    What is in a loop counts as often as the loop runs.
    """
    computations = parse(program)
    known = {i.name: i for body in computations.values() for i in body}
    found = dict.fromkeys(("kernels", "traffic", "collectives"), 0)
    products: collections.Counter[str] = collections.Counter()

    def visit(computation: str, times: int, in_kernel: bool) -> None:
        for i in computations.get(computation, ()):
            operation = i.operation.removesuffix("-start")
            operands = [known[x] for x in i.operands]
            trips = i.attribute(r'known_trip_count":{"n":"(\d+)"')
            if operation == "while" and trips:
                visit(i.attribute(r"body=%([\w.\-]+)"), times * int(trips), in_kernel)
                continue
            if operation == "dot" or "__cu" in i.attribute('custom_call_target="(.*?)"'):
                dtypes = {x.shapes.lstrip("(").split("[")[0] for x in operands[:2]}
                products["x".join(sorted(dtypes))] += times
            found["collectives"] += times * (operation in COLLECTIVES)
            kernel = [i]
            if operation == "fusion":
                called = i.attribute(r"calls=%([\w.\-]+)")
                kernel = computations[called]
                visit(called, times, True)
            if operation in KERNELS and not in_kernel:
                found["kernels"] += times
                found["traffic"] += times * moved(kernel, operands, known)

    visit("ENTRY", 1, False)
    return {**found, "traffic": found["traffic"] / 1e6, "products": dict(products)}
