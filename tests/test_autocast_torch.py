"""`autocast` beside torch's own, in float16 on a CPU: the same nets, weights and inputs.

`pip install torch` for these. Torch's lists for CPUs and for CUDA differ: here its softmax and its
norms take float16. What both are held against is torch in float64.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscale

torch = pytest.importorskip("torch")
F = torch.nn.functional

# Rounding to float16 moves a number by at most this part of it.
HALF_ULP = 2.0**-11
# A power of two, to lift gradients out of float16's subnormal numbers; divided out in float64.
SCALE = 2.0**12
# Of weights and inputs. In a single one, luck decides which of the two is nearer.
DRAWS = 12


class Net(NamedTuple):
    """A loss function written twice, in the same words as far as possible.

    Attributes:
      jax_loss: of parameters and inputs.
      torch_loss: of the same.
      params: the shape of each parameter.
      inputs: the shape of each input; an int is a number of labels out of ten.
    """

    jax_loss: Callable[..., Any]
    torch_loss: Callable[..., Any]
    params: dict[str, tuple[int, ...]]
    inputs: tuple[tuple[int, ...] | int, ...]

    def draw(self, seed):
        """Parameters and inputs as NumPy arrays of which no product is much above one."""
        rng = np.random.default_rng(seed)
        params = {name: rng.normal(size=shape) for name, shape in self.params.items()}
        for name, x in params.items():
            x *= 0.1 if x.ndim == 1 else np.prod(x.shape[:-1]) ** -0.5
            x += name == "scale"
        draw = lambda n: rng.integers(10, size=n) if isinstance(n, int) else rng.normal(size=n)
        return params, *map(draw, self.inputs)


def cross_entropy(logits, labels):
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_probs, labels[:, None], axis=-1))


def layer_norm(x, scale, shift):
    return jax.nn.standardize(x, epsilon=1e-5) * scale + shift


def mlp_in_jax(p, x, labels):
    h = jax.nn.gelu(x @ p["wi"] + p["bi"], approximate=False)
    h = layer_norm(h, p["scale"], p["shift"])
    return cross_entropy(h @ p["wo"] + p["bo"], labels)


def mlp_in_torch(p, x, labels):
    h = F.gelu(F.linear(x, p["wi"].T, p["bi"]))
    h = F.layer_norm(h, h.shape[-1:], p["scale"], p["shift"])
    return F.cross_entropy(F.linear(h, p["wo"].T, p["bo"]), labels)


def conv_net_in_jax(p, x, labels):
    conv = functools.partial(
        jax.lax.conv_general_dilated,
        padding=((1, 1), (1, 1)),
        dimension_numbers=("NCHW", "HWIO", "NCHW"),
    )
    h = jax.nn.silu(conv(x, p["k1"], (1, 1)) + p["b1"][:, None, None])
    h = jax.nn.silu(conv(h, p["k2"], (2, 2)))
    return cross_entropy(jnp.mean(h, axis=(2, 3)) @ p["wo"], labels)


def conv_net_in_torch(p, x, labels):
    k1, k2 = (p[name].permute(3, 2, 0, 1) for name in ("k1", "k2"))
    h = F.silu(F.conv2d(x, k1, p["b1"], padding=1))
    h = F.silu(F.conv2d(h, k2, stride=2, padding=1))
    return F.cross_entropy(h.mean((2, 3)) @ p["wo"], labels)


def attention_in_jax(p, x, target):
    h = layer_norm(x, p["scale"], p["shift"]) @ p["qkv"]
    q, k, v = h.reshape(*h.shape[:2], 3, 4, -1).transpose(2, 0, 3, 1, 4)
    scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    h = jax.nn.softmax(scores) @ v
    y = x + h.swapaxes(1, 2).reshape(x.shape) @ p["proj"]
    return jnp.mean(jnp.square(y - target))


def attention_in_torch(p, x, target):
    h = F.layer_norm(x, x.shape[-1:], p["scale"], p["shift"]) @ p["qkv"]
    q, k, v = h.reshape(*h.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    h = torch.softmax(scores, -1) @ v
    y = x + h.transpose(1, 2).reshape(x.shape) @ p["proj"]
    return F.mse_loss(y, target)


NETS = {
    "mlp": Net(
        mlp_in_jax,
        mlp_in_torch,
        dict(wi=(32, 64), bi=(64,), scale=(64,), shift=(64,), wo=(64, 10), bo=(10,)),
        ((16, 32), 16),
    ),
    "conv_net": Net(
        conv_net_in_jax,
        conv_net_in_torch,
        dict(k1=(3, 3, 3, 8), b1=(8,), k2=(3, 3, 8, 16), wo=(16, 10)),
        ((4, 3, 8, 8), 4),
    ),
    "attention": Net(
        attention_in_jax,
        attention_in_torch,
        dict(scale=(32,), shift=(32,), qkv=(32, 96), proj=(32, 32)),
        ((2, 8, 32), (2, 8, 32)),
    ),
}


def in_jax(loss_fn, draws):
    """Loss and gradients for each draw."""
    to_jax = lambda x: jnp.asarray(x, jnp.float32 if x.dtype == np.float64 else jnp.int32)
    step = jax.jit(jax.value_and_grad(lambda *args: SCALE * loss_fn(*args)))
    unscale = lambda x: np.asarray(x, np.float64) / SCALE
    with jax.numpy_rank_promotion("allow"):  # for biases, as in torch
        results = [step(*jax.tree.map(to_jax, draw)) for draw in draws]
    return [{"loss": loss, **grads} for loss, grads in jax.tree.map(unscale, results)]


def in_torch(loss_fn, draws, dtype, autocast):
    to_torch = lambda x: torch.tensor(x, dtype=dtype if x.dtype == np.float64 else torch.int64)
    results = []
    for params, *inputs in draws:
        params = {name: to_torch(x).requires_grad_() for name, x in params.items()}
        with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
            loss = loss_fn(params, *map(to_torch, inputs))
        (SCALE * loss.to(dtype)).backward()
        grads = {name: x.grad.double().numpy() / SCALE for name, x in params.items()}
        results.append({"loss": np.float64(loss.item()), **grads})
    return results


def distances(got, want):
    """How far each array is from what it should be, as part of the latter, draw by draw."""
    distance = lambda g, w: np.linalg.norm(g - w) / np.linalg.norm(w)
    pairs = [*zip(got, want, strict=True)]
    return {name: np.array([distance(g[name], w[name]) for g, w in pairs]) for name in want[0]}


def rms(distances):
    """Of the gradients. Of the loss, one number that is rounded once or twice, luck decides."""
    return np.sqrt(np.mean([np.square(x) for name, x in distances.items() if name != "loss"]))


@pytest.mark.parametrize("name", NETS)
def test_autocast_is_as_near_to_the_truth_as_that_of_torch(name):
    net = NETS[name]
    draws = [net.draw(seed) for seed in range(DRAWS)]
    exact = in_torch(net.torch_loss, draws, torch.float64, autocast=False)
    ours = in_jax(jscale.autocast(net.jax_loss), draws)
    theirs = in_torch(net.torch_loss, draws, torch.float32, autocast=True)

    # The two nets are one: in float32, JAX's is torch's.
    assert all(np.all(x < 2.0**-20) for x in distances(in_jax(net.jax_loss, draws), exact).values())

    # A gradient depends on at most eight products, which round both operands and their result;
    # independent errors add up as the root of their number.
    bound = np.sqrt(3 * 8) * HALF_ULP
    assert all(np.all(x < bound) for x in distances(ours, exact).values())
    assert all(np.all(x < np.sqrt(2) * bound) for x in distances(ours, theirs).values())

    ratio = rms(distances(ours, exact)) / rms(distances(theirs, exact))
    print(f"{name}: jscale is off by {ratio:.2f} of what torch is")
    assert ratio <= 1
