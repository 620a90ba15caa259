"""What loss scaling adds to a train step on a GPU, read off the compiled program; no GPU needed.

XLA's CUDA compiler is asked for the program of a step (float32 weights, float16 compute, parameters
and optimizer state donated) on a described GPU: unscaled, with jscale, and as the users of other
libraries write it (peer_steps.py). Counted are kernels, the traffic they would cause (operands and
results of each), temporary memory, the bytes of parameters and state that are not updated in place,
collectives, and products. The counts are exact and repeat.

    pip install '.[gpu-program,test]'                 # jax 0.12 or newer; about 260 MB
    pip install mixed_precision_for_JAX               # optional: for mpx
    python experiments/gpu_structure.py               # 3 minutes on 2 cores

With jax 0.12.0.1, a transformer of 6 layers and width 768, which has 49 parameters:

    H200                  kernels  traffic MB   temp MB  copied  collectives  products
    AdamW
      unscaled                351      6262.8     706.9       0            0  111 f16
      jscale                  +38     x1.0180   x1.0000       5            0  111 f16
      flax                    +78     x1.0180   x1.0000       0            0  111 f16
      jmp                     +78     x1.0180   x1.0000       0            0  111 f16
      mpx                     +76     x1.0180   x1.0015       0            0  111 f16
      optax                   +80     x1.0180   x1.0000       1            0  111 f16
    AdamW, clip
      unscaled                426      6375.5     711.6       0            0  111 f16
      jscale                  -36     x1.0000   x1.0000       5            0  111 f16
      flax                    +48     x1.0122   x0.9934       0            0  111 f16
      jmp                     +47     x1.0122   x0.9934       0            0  111 f16
      mpx                     +76     x1.0149   x0.9934       0            0  111 f16
      optax                   +50     x1.0122   x0.9934       1            0  111 f16

Without clipping the added traffic is one read of the gradients, for their norm; with it, the norm
is there already. Added kernels are those of the norm, two for a large matrix, and a few for the
scalars; but the updates of parameters of one shape become one kernel, since they read the flag from
an array, so that there are fewer kernels than unscaled. What jscale does not update in place are
the last step's flag and norm, which nobody reads. (Neither does an unscaled Adafactor read its
empty placeholders.)

With `--outputs` the step also returns what the library tells of it: the 7 numbers of
`jscale.metrics` are copied by a kernel each, those of flax and jmp by one.

    python experiments/gpu_structure.py --gpu A100 --libraries unscaled jscale
    python experiments/gpu_structure.py --gpu "RTX A6000" --libraries unscaled jscale

No GeForce is described; the A6000 is of the family of the RTX 3090.

    A100                  kernels  traffic MB   temp MB  copied  collectives  products
    AdamW
      unscaled                334      5438.2     629.2       0            0  111 f16
      jscale                  +38     x1.0199   x1.0000       5            0  111 f16
    AdamW, clip
      unscaled                409      5546.2     629.2       0            0  111 f16
      jscale                  -36     x1.0000   x1.0000       5            0  111 f16
    RTX A6000             kernels  traffic MB   temp MB  copied  collectives  products
    AdamW
      unscaled                333      5347.0     629.2       0            0  111 f16
      jscale                  +38     x1.0202   x1.0000       5            0  111 f16
    AdamW, clip
      unscaled                408      5455.0     629.2       0            0  111 f16
      jscale                  -36     x1.0000   x1.0000       5            0  111 f16

    python experiments/gpu_structure.py --all --libraries unscaled jscale   # 6 minutes

Other steps, of two such layers (17 parameters), or of a perceptron with 64 x 64 matrices:

    H200                  kernels  traffic MB   temp MB  copied  collectives  products
    AdamW
      unscaled                351      6262.8     706.9       0            0  111 f16
      jscale                  +38     x1.0180   x1.0000       5            0  111 f16
    SGD
      unscaled                125      2041.1     247.2       0            0  39 f16
      jscale                  +20     x1.0205   x1.0042       5            0  39 f16
    Adafactor
      unscaled                286      2180.6     247.2     100            0  39 f16
      jscale                  -28     x1.0141   x1.0000       5            0  39 f16
    Muon
      unscaled                334      5824.0     248.2       0            0  39 f16, 135 f32
      jscale                  +36     x1.0218   x1.0837       5            0  39 f16, 135 f32
    4 micro-batches
      unscaled                132      2280.3     247.2       0            0  39 f16
      jscale                  +17     x1.0183   x1.0042       5            0  39 f16
    two rules
      unscaled                127      2160.7     247.2       0            0  39 f16
      jscale                  +21     x1.0193   x1.0000       9            0  39 f16
    FSDP over 8
      unscaled                132       523.0      60.8       0           19  39 f16
      jscale                  +28     x1.0140   x1.0128       5           19  39 f16
    12 small leaves
      unscaled                 56         1.5       0.1       0            0  17 f16
      jscale                   +8     x1.0328   x0.9803       5            0  17 f16
    300 small leaves
      unscaled               1352        38.4       2.5       0            0  449 f16
      jscale                  +35     x1.0325   x0.9749       5            0  449 f16
    AdamW, clip
      unscaled                426      6375.5     711.6       0            0  111 f16
      jscale                  -36     x1.0000   x1.0000       5            0  111 f16
    SGD, clip
      unscaled                152      2092.3     248.2       0            0  39 f16
      jscale                   -6     x0.9955   x1.0000       5            0  39 f16
    Adafactor, clip
      unscaled                313      2217.7     248.2     100            0  39 f16
      jscale                  -54     x1.0000   x1.0000       5            0  39 f16
    Muon, clip
      unscaled                361      5861.0     248.2       0            0  39 f16, 135 f32
      jscale                  +10     x1.0153   x1.0837       5            0  39 f16, 135 f32
    4 micro-batches, clip
      unscaled                159      2374.0     247.2       0            0  39 f16
      jscale                   +7     x1.0169   x1.0000       5            0  39 f16
    two rules, clip
      unscaled                154      2202.5     248.2       0            0  39 f16
      jscale                   -3     x1.0000   x1.0000       9            0  39 f16
    FSDP over 8, clip
      unscaled                162       530.3      68.1       0           19  39 f16
      jscale                   +1     x1.0000   x0.9046       5           19  39 f16
    12 small leaves, clip
      unscaled                 69         1.6       0.1       0            0  17 f16
      jscale                   -5     x1.0000   x0.9780       5            0  17 f16
    300 small leaves, clip
      unscaled               1656        39.6       2.5       0            0  449 f16
      jscale                 -268     x0.9999   x0.9744       5            0  449 f16

What is more than elsewhere: without clipping, an unscaled update may follow each gradient at once;
on 8 devices, where little else is kept, it shows that a check has to wait for all of them. Muon
multiplies the new momentum, which is another array than the one that is kept if the step is
finite. With micro-batches, clipping takes the norm of their sum, not of each.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro
from gpu_program import described_device, described_devices, figures
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from peer_steps import LIBRARIES, installed, make_step

import jscale

WIDTH, BATCH, LENGTH, HEADS, VOCABULARY = 768, 8, 256, 12, 1024
SMALL_WIDTH, SMALL_BATCH = 64, 64
f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)

# A model: loss function, parameters, data.


def transformer(layers: int):
    block = dict(
        gain1=f32(WIDTH),
        qkv=f32(WIDTH, 3 * WIDTH),
        out=f32(WIDTH, WIDTH),
        gain2=f32(WIDTH),
        up=f32(WIDTH, 4 * WIDTH),
        up_bias=f32(4 * WIDTH),
        down=f32(4 * WIDTH, WIDTH),
        down_bias=f32(WIDTH),
    )
    params = {f"block{i}": block for i in range(layers)} | {"head": f32(WIDTH, VOCABULARY)}
    labels = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    return loss_fn, params, (f32(BATCH, LENGTH, WIDTH), labels)


def norm(x, gain):
    x = x.astype(jnp.float32)
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)
    return (x * gain.astype(jnp.float32)).astype(jnp.float16)


def loss_fn(params, x, labels):
    params, x = jscale.Policy("half").cast_to_compute((params, x))
    for i in range(len(params) - 1):
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


def small_leaves(number: int):
    """A perceptron of that many small parameters: of each layer a matrix and a bias."""

    def loss_fn(params, x, y):
        params, x = jscale.Policy("half").cast_to_compute((params, x))
        for p in params:
            x = jnp.tanh(x @ p["w"] + p["b"])
        return jnp.mean(jnp.square(x.astype(jnp.float32) - y.astype(jnp.float32)))

    layer = {"w": f32(SMALL_WIDTH, SMALL_WIDTH), "b": f32(SMALL_WIDTH)}
    return loss_fn, [layer] * (number // 2), [f32(SMALL_BATCH, SMALL_WIDTH)] * 2


class Case(NamedTuple):
    tx: optax.GradientTransformation
    model: Callable[[], Any]
    devices: int = 1
    rule: Any = None


def in_fours(tx):
    """A step of `tx` for every four micro-batches."""
    return optax.MultiSteps(tx, 4).gradient_transformation()


def cases(clip: bool) -> dict[str, Case]:
    inside = lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx) if clip else tx
    six, two = (functools.partial(transformer, n) for n in (6, 2))
    small = lambda n: functools.partial(small_leaves, n)
    adamw = inside(optax.adamw(1e-3))
    rules = {"head": jscale.dynamic(), "": jscale.dynamic()}
    named = {
        "AdamW": Case(adamw, six),
        "SGD": Case(inside(optax.sgd(0.1, momentum=0.9)), two),
        "Adafactor": Case(inside(optax.adafactor(1e-3)), two),
        "Muon": Case(inside(optax.contrib.muon(1e-3)), two),
        "4 micro-batches": Case(in_fours(adamw), two),
        "two rules": Case(adamw, two, rule=rules),
        "FSDP over 8": Case(adamw, two, devices=8),
        "12 small leaves": Case(adamw, small(12)),
        "300 small leaves": Case(adamw, small(300)),
    }
    return {f"{name}{', clip' if clip else ''}": case for name, case in named.items()}


CASES = cases(clip=False) | cases(clip=True)


def measure(case: str, library: str, gpu: str = "H200", outputs: bool = False) -> dict[str, Any]:
    """The figures of a step.

    With `outputs` it returns all that the library tells of the step, else the loss alone.
    """
    tx, model, devices, rule = CASES[case]
    loss_fn, params, data = model()
    own = {"rule": rule, "root": ""} if library == "jscale" and rule else {}
    telling, init = make_step(library, loss_fn, tx, **own)

    def step(params, state, x, y):
        params, state, told = telling(params, state, x, y)
        return params, state, told if outputs else told["loss"]

    state = jax.eval_shape(init, params)
    if devices > 1:
        mesh = Mesh(described_devices(gpu, f"1x1x{devices}"), "data", axis_types=(AxisType.Auto,))
        spread = lambda x: NamedSharding(mesh, P("data") if x.ndim else P())
        place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spread(x))
        params, state, data = jax.tree.map(place, (params, state, data))
    found = figures(step, params, state, *data, gpu=gpu, donate_argnums=(0, 1))
    size = lambda x: x.size * x.dtype.itemsize // (devices if x.ndim else 1)
    kept = sum(map(size, jax.tree.leaves((params, state))))
    return {**found, "copied": kept - found["in place"]}


@dataclasses.dataclass(frozen=True)
class Config:
    """What loss scaling adds to a train step on a GPU."""

    gpu: str = "H200"
    """Which GPU to compile for; it need not be there."""
    cases: tuple[str, ...] = ("AdamW", "AdamW, clip")
    """Which steps."""
    all: bool = False
    """All steps: other optimizers, accumulation, two rules, 8 devices, small leaves."""
    libraries: tuple[str, ...] = tuple(LIBRARIES)
    """Which libraries; those that are not installed are left out."""
    outputs: bool = False
    """The step returns all that the library tells of it, not the loss alone."""


def row(found, base) -> str:
    """Figures, relative to those of the unscaled step."""
    kernels, traffic, temp = (found[key] for key in ("kernels", "traffic", "temp"))
    if found is base:
        text = f"{kernels:9d}{traffic:12.1f}{temp:10.1f}"
    else:
        text = f"{kernels - base['kernels']:+9d}"
        for width, ratio in ((12, traffic / base["traffic"]), (10, temp / base["temp"])):
            text += f"{f'x{ratio:.4f}':>{width}}"
    products = ", ".join(f"{n} {dtype}" for dtype, n in found["products"].items())
    return f"{text}{found['copied']:8d}{found['collectives']:13d}  {products}"


def main(config: Config):
    described_device(config.gpu)  # or an error before anything is printed
    columns = (
        f"{'kernels':>9s}{'traffic MB':>12s}{'temp MB':>10s}{'copied':>8s}{'collectives':>13s}"
    )
    print(f"{config.gpu:20s}{columns}  products")
    for case in CASES if config.all else config.cases:
        print(case)
        base = None
        for library in config.libraries:
            if CASES[case].rule and library not in ("unscaled", "jscale"):
                continue  # that has but one scale
            if not installed(library):
                print(f"  {library:18s}{'not installed':>18s}")
                continue
            found = measure(case, library, config.gpu, config.outputs)
            base = base or found
            print(f"  {library:18s}{row(found, base)}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Config))
