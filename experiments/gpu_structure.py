"""What loss scaling adds to a train step on a GPU, read off the compiled program; no GPU needed.

XLA's CUDA compiler is asked for the program of one AdamW step of a 6-layer transformer of width 768
(float32 weights, float16 compute, params and state donated) on a described H200, with and without
`jscale.with_loss_scale`. Counted are kernels, the traffic they would cause (operands and results of
each), and temporary memory. The counts are exact and repeat.

    pip install '.[gpu-program]'                      # jax 0.12 or newer; about 260 MB
    python experiments/gpu_structure.py               # about 1 minute on 2 cores

With jax 0.12.0.1:

                                   kernels   traffic MB             temp MB
    no clipping           unscaled     351       6262.8               706.9
                          jscale       +83      x1.0180             x1.0000
    clip_by_global_norm   unscaled     426       6375.5               711.6
                          jscale       +10      x1.0000             x1.0000

Without clipping the added traffic is one read of the gradients, for their norm; with it, the norm
is there already.
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
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from measured_step import make_step

import jscale

WIDTH, LAYERS, BATCH, LENGTH, HEADS, VOCABULARY = 768, 6, 8, 256, 12, 1024
BYTES = dict(
    pred=1, s8=1, u8=1, f16=2, bf16=2, s16=2, u16=2, s32=4, u32=4, f32=4, s64=8, u64=8, f64=8
)
KERNELS = ("fusion", "custom-call", "dot", "copy", "reduce", "conditional", "while")


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


def parameters():
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    block = dict(
        gain1=shape(WIDTH),
        qkv=shape(WIDTH, 3 * WIDTH),
        out=shape(WIDTH, WIDTH),
        gain2=shape(WIDTH),
        up=shape(WIDTH, 4 * WIDTH),
        up_bias=shape(4 * WIDTH),
        down=shape(4 * WIDTH, WIDTH),
        down_bias=shape(WIDTH),
    )
    return {f"block{i}": block for i in range(LAYERS)} | {"head": shape(WIDTH, VOCABULARY)}


def norm(x, gain):
    x = x.astype(jnp.float32)
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)
    return (x * gain.astype(jnp.float32)).astype(jnp.float16)


def loss_fn(params, x, labels):
    params, x = jscale.Policy("half").cast_to_compute((params, x))
    for i in range(LAYERS):
        p = params[f"block{i}"]
        qkv = (norm(x, p["gain1"]) @ p["qkv"]).reshape(BATCH, LENGTH, 3, HEADS, -1)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = jnp.einsum("bthk,bshk->bhts", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(scores, -1).astype(jnp.float16)
        x = x + jnp.einsum("bhts,bshk->bthk", weights, v).reshape(x.shape) @ p["out"]
        h = jax.nn.gelu(norm(x, p["gain2"]) @ p["up"] + p["up_bias"])
        x = x + h @ p["down"] + p["down_bias"]
    logits = (x @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def figures(fun, *args, gpu: str = "H200", **options) -> dict[str, Any]:
    """Kernels, traffic in MB, temporary memory in MB and products of `fun`, compiled for a GPU."""
    sharding = SingleDeviceSharding(described_device(gpu))
    placed = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    compiled = jax.jit(fun, **options).lower(*jax.tree.map(placed, args)).compile()
    return {
        **count(compiled.as_text()),
        "temp": compiled.memory_analysis().temp_size_in_bytes / 1e6,
    }


def measure(clip: bool, scaled: bool, gpu: str = "H200") -> dict[str, Any]:
    """The figures of the compiled step."""
    tx = optax.adamw(1e-3)
    if clip:
        tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
    step, tx = make_step(loss_fn, tx, scaled)
    state = jax.eval_shape(tx.init, parameters())
    data = (
        jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32),
    )
    return figures(step, parameters(), state, *data, gpu=gpu, donate_argnums=(0, 1))


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
    """Kernels, the bytes they read and write, in MB, and products by the dtype of their operands.

    What is in a loop counts as often as the loop runs.
    """
    computations = parse(program)
    known = {i.name: i for body in computations.values() for i in body}
    total: collections.Counter[str] = collections.Counter()

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
                total["x".join(sorted(dtypes))] += times
            kernel = [i]
            if operation == "fusion":
                called = i.attribute(r"calls=%([\w.\-]+)")
                kernel = computations[called]
                visit(called, times, True)
            if operation in KERNELS and not in_kernel:
                total["kernels"] += times
                total["traffic"] += times * moved(kernel, operands, known)

    visit("ENTRY", 1, False)
    kernels, traffic = total.pop("kernels"), total.pop("traffic")
    return {"kernels": kernels, "traffic": traffic / 1e6, "products": dict(total)}


def main(gpu: str = "H200"):
    described_device(gpu)  # or an error before anything is printed
    print(f"{gpu:27s}    kernels   traffic MB             temp MB")
    for clip, label in ((False, "no clipping"), (True, "clip_by_global_norm")):
        base, ours = measure(clip, False, gpu), measure(clip, True, gpu)
        print(f"{label:21s} unscaled {base['kernels']:7d} {base['traffic']:12.1f}", end="")
        print(f" {base['temp']:19.1f}")
        print(f"{'':21s} jscale   {ours['kernels'] - base['kernels']:+7d}", end="")
        for key, width in (("traffic", 12), ("temp", 19)):
            print(f" {'x%.4f' % (ours[key] / base[key]):>{width}}", end="")
        print()


if __name__ == "__main__":
    main(*sys.argv[1:])
