"""autocast of programs that nobody would write, against the same program cast by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jscale import autocast

F16, F32 = jnp.float16, jnp.float32
POLICIES = (
    None,
    jax.checkpoint_policies.dots_saveable,
    jax.checkpoint_policies.save_only_these_names("y"),
)

# A program is a list of steps on one matrix x[4, 4]. No step makes a difference between two values
# of x larger (in the Frobenius norm), and none leaves [-1, 1] for good: weights are orthogonal.
X = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (4, 4)), F32)
WEIGHTS = jnp.asarray(
    [np.linalg.qr(np.random.default_rng(i).normal(size=(4, 4)))[0] for i in range(1, 4)], F32
)
PLACES = np.cos(np.arange(16, dtype=np.float32)).reshape(4, 4)

SIMPLE = {
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "softplus": lambda x: jax.nn.softplus(x) - 0.5,
    "sigmoid": jax.nn.sigmoid,
    "scale": lambda x: x * 0.75,
    "center": lambda x: x - jnp.mean(x, -1, keepdims=True),
    "norm": lambda x: x / jnp.sqrt(1 + jnp.sum(x * x, -1, keepdims=True)),
    "softmax": lambda x: jax.nn.softmax(x, -1),
    "cumsum": lambda x: jnp.cumsum(x, 0) / 4,
    "transpose": lambda x: x.T,
    "reshape": lambda x: jnp.swapaxes(x.reshape(2, 2, 4), 0, 1).reshape(4, 4),
    "flip": lambda x: x[::-1],
    "roll": lambda x: jnp.roll(x, 1, 0),
    "new_axis": lambda x: x[None][0],
    "halves": lambda x: jnp.concatenate([x[2:], -x[:2]]),
    "turn": lambda x: jnp.stack([x[:, ::2], -x[:, 1::2]], -1).reshape(4, 4),
    "update": lambda x: x.at[0].set(jnp.tanh(x[1])),
    "take": lambda x: x[jnp.array([0, 2, 1, 3])],
    "where": lambda x: jnp.where(jnp.tril(jnp.ones((4, 4), bool)), x, 0.0),
    "name": lambda x: checkpoint_name(x, "y"),
    "round_trip": lambda x: x.astype(F16).astype(F32),
    "barrier": lax.optimization_barrier,
}

simple = st.tuples(st.just("simple"), st.sampled_from(sorted(SIMPLE)))
product = st.tuples(
    st.just("product"),
    st.sampled_from(["right", "left", "einsum", "batched", "vectors", "self"]),
    st.integers(0, 2),
)


def call(steps):
    some = st.lists(steps, min_size=1, max_size=3)
    return st.one_of(
        st.tuples(st.just("scan"), some, st.integers(1, 3), st.booleans(), st.integers(1, 2)),
        st.tuples(st.just("scan_weights"), some, st.booleans()),
        st.tuples(st.just("fori"), some, st.integers(0, 2)),
        st.tuples(st.just("cond"), some, some, st.booleans()),
        st.tuples(st.just("jit"), some),
        st.tuples(st.just("checkpoint"), some, st.integers(0, 2)),
        st.tuples(st.just("vmap"), some),
        st.tuples(st.just("custom_jvp"), some),
        st.tuples(st.just("custom_vjp"), some),
        st.tuples(st.just("twice"), some),
    )


steps = st.recursive(st.one_of(product, simple, product), call, max_leaves=6)
programs = st.lists(steps, min_size=1, max_size=4)


def apply_product(mm, how, x, w):
    if how == "right":
        return mm(x, w)
    if how == "left":
        return mm(w, x.T).T
    if how == "einsum":
        return mm(x, jnp.einsum("ij->ji", w))
    if how == "batched":
        return jax.vmap(mm, (0, None))(x.reshape(2, 2, 4), w).reshape(4, 4)
    if how == "vectors":
        return jax.vmap(mm, (0, None))(x, w)
    return jnp.tanh(mm(x, x.T) / 8)


def run(mm, program, x, ws):
    """Interprets a program, with `mm` for its products."""
    for step in program:
        x = run_step(mm, step, x, ws)
    return x


def run_step(mm, step, x, ws):
    kind, *rest = step
    if kind == "simple":
        return SIMPLE[rest[0]](x)
    if kind == "product":
        return apply_product(mm, rest[0], x, ws[rest[1]])
    body = functools.partial(run, mm, rest[0])
    if kind == "scan":
        _, length, reverse, unroll = rest

        def turn(carry, i):
            x, n, weak = carry
            x = body(x, ws)
            return (x, n + 1, weak * 0.5), (x[0], i)

        start = x, jnp.int32(0), 1.0
        (x, _, weak), (rows, _) = lax.scan(
            turn, start, jnp.arange(length), reverse=reverse, unroll=unroll
        )
        return (x + weak * jnp.mean(rows, 0, keepdims=True)) / 2
    if kind == "scan_weights":
        turn = lambda x, w: (jnp.tanh(mm(body(x, ws), w)), None)
        return lax.scan(turn, x, ws[:2], reverse=rest[1])[0]
    if kind == "fori":
        return lax.fori_loop(0, rest[1], lambda i, x: body(x, ws), x)
    if kind == "cond":
        other = functools.partial(run, mm, rest[1])
        return lax.cond(ws[0, 0, 0] < (9 if rest[2] else -9), body, other, x, ws)
    if kind == "jit":
        return jax.jit(lambda x, ws: (ws, body(x, ws)))(x, ws)[1]
    if kind == "checkpoint":
        return jax.checkpoint(body, policy=POLICIES[rest[1]])(x, ws)
    if kind == "vmap":
        return jnp.mean(jax.vmap(body, (0, None))(jnp.stack([x, -x / 2]), ws), 0)
    if kind == "custom_jvp":
        own = jax.custom_jvp(body)
        own.defjvp(lambda p, t: (own(*p), jax.jvp(body, p, t)[1]))
        return own(x, ws)
    if kind == "custom_vjp":
        own = jax.custom_vjp(body)
        own.defvjp(lambda x, ws: jax.vjp(body, x, ws), lambda pull, ct: pull(ct))
        return own(x, ws)
    assert kind == "twice"  # the same jaxpr in two places
    same = jax.jit(body)
    return same(jnp.tanh(same(x, ws)), ws)


def executed(program):
    """How many products a program runs."""
    n = 0
    for kind, *rest in program:
        inside = executed(rest[0]) if kind not in ("simple", "product") else 0
        times = {"scan": lambda: rest[1], "fori": lambda: rest[1]}.get(kind, lambda: 1)()
        times = 2 if kind in ("twice", "vmap", "scan_weights") else times
        if kind == "cond":
            inside = max(inside, executed(rest[1]))
        n += {"product": 1, "simple": 0}.get(kind, times * inside)
        n += 2 * (kind == "scan_weights")
    return n


def by_hand(x, w):
    return (x.astype(F16) @ w.astype(F16)).astype(F32)


def loss(fun):
    return lambda x, ws: jnp.sum(fun(x, ws) * PLACES) / 4


def with_gradients(fun):
    return lambda x, ws: (fun(x, ws), jax.grad(loss(fun), (0, 1))(x, ws))


def products(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield str(eqn.outvars[0].aval.dtype)
        for value in jax.tree.leaves([*eqn.params.values()], is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(value, "eqns"):
                yield from products(value)


def norm(x):
    return float(np.linalg.norm(np.asarray(x, np.float64)))


def has(program, name):
    """Whether a step of that name is anywhere in a program."""
    return any(
        x == name or (isinstance(x, list | tuple) and has(x, name))
        for step in program
        for x in step
    )


@settings(max_examples=30, deadline=None, derandomize=True)
@given(programs)
def test_any_program_keeps_its_types_and_its_products_are_float16(program):
    plain = functools.partial(run, jnp.matmul, program)
    for recompute in (True, False):
        cast = autocast(plain, recompute=recompute)
        for f, g in ((cast, plain), *[map(with_gradients, (cast, plain))]):
            got, want = jax.make_jaxpr(f)(X, WEIGHTS), jax.make_jaxpr(g)(X, WEIGHTS)
            assert [(x.shape, x.dtype, x.weak_type) for x in got.out_avals] == [
                (x.shape, x.dtype, x.weak_type) for x in want.out_avals
            ]
            if not has(program, "round_trip"):  # what is cast up by hand stays float32
                assert {*products(got)} <= {"float16"}
        assert len([*products(jax.make_jaxpr(cast)(X, WEIGHTS))]) == len(
            [*products(jax.make_jaxpr(plain)(X, WEIGHTS))]
        )


@settings(max_examples=12, deadline=None, derandomize=True)
@given(programs, st.booleans())
def test_any_program_computes_what_casts_by_hand_compute(program, recompute):
    plain, hand = (functools.partial(run, mm, program) for mm in (jnp.matmul, by_hand))
    cast = autocast(plain, recompute=recompute)
    got, want = jax.jit(with_gradients(cast))(X, WEIGHTS), jax.jit(with_gradients(hand))(X, WEIGHTS)
    n = executed(program)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype, g.weak_type) == (w.shape, w.dtype, w.weak_type)
        assert np.isfinite(g).all()
        # What XLA fuses otherwise may tip a rounding to float16, in any product, for 2^-11 of it.
        # Where a cast by hand was kept in float32, the two differ by whole roundings.
        tip = 2.0**-8 if has(program, "round_trip") else 2.0**-10
        assert norm(g - w) <= (n + 1) * tip * max(norm(w), 1)
    # Compiled or not.
    assert norm(cast(X, WEIGHTS) - got[0]) <= (n + 1) * 2.0**-10 * max(norm(got[0]), 1)
    # With |x| <= 4 and |w| = 2, a product errs by (4 + 4 + 4) * 2^-11, and no step adds to it.
    assert norm(got[0] - jax.jit(plain)(X, WEIGHTS)) <= max(n, 1) * 12 * 2.0**-11
