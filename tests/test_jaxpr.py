"""What jscale uses of JAX beyond documented names: see jscale/_jaxpr.py."""

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from helpers import assert_same_bits

from jscale._jaxpr import body, function, nbytes, replace, scope, source, subjaxprs, title, var

X = jnp.ones((2, 2))


@jax.custom_jvp
def with_jvp(x):
    return x


@jax.custom_vjp
def with_vjp(x):
    return x


with_jvp.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
with_vjp.defvjp(lambda x: (x, None), lambda _, g: (g,))


def conv(x):
    return jax.lax.conv(x[None, None], x[None, None], (1, 1), "SAME")


def ragged(x):
    return jax.lax.ragged_dot(x, x[None], jnp.array([2]))


def scan(x):
    return jax.lax.scan(lambda c, _: (c + 1, c), x, None, length=3)


def loop(x):
    return jax.lax.while_loop(lambda x: x[0, 0] < 3, lambda x: x + 1, x)


def switch(x):
    return jax.lax.switch(jnp.int32(0), [jnp.sin, jnp.cos], x)


PRODUCT = ["preferred_element_type", "precision"]
EQUATIONS = {
    "dot_general": (lambda x: x @ x, [*PRODUCT, "dimension_numbers"]),
    "conv_general_dilated": (conv, PRODUCT),
    "ragged_dot_general": (ragged, PRODUCT),
    "convert_element_type": (
        lambda x: x.astype(jnp.float16),
        ["new_dtype", "weak_type", "sharding"],
    ),
    "jit": (jax.jit(jnp.sin), ["jaxpr", "name"]),
    "scan": (scan, ["jaxpr", "length", "unroll", "reverse"]),
    "while": (loop, ["cond_jaxpr", "body_jaxpr"]),
    "cond": (switch, ["branches"]),
    "remat2": (jax.checkpoint(jnp.sin), ["jaxpr"]),
    "custom_jvp_call": (with_jvp, ["call_jaxpr", "num_consts", "jvp_jaxpr_fun"]),
    "custom_vjp_call": (with_vjp, ["call_jaxpr", "num_consts", "fwd_jaxpr_thunk", "bwd"]),
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_equations_have_the_names_and_parameters_that_are_read(name):
    fun, parameters = EQUATIONS[name]
    found = {eqn.primitive.name: eqn for eqn in body(jax.make_jaxpr(fun)(X)).eqns}
    assert set(parameters) <= set(found[name].params)


def test_a_scan_hands_its_operands_to_its_body_in_order():
    def step(carry, x):
        return carry + 1.0, x * 2.0

    fun = lambda carry, xs: jax.lax.scan(step, carry, xs)
    (eqn,) = [
        eqn
        for eqn in body(jax.make_jaxpr(fun)(jnp.ones(2), jnp.ones((3, 4, 5)))).eqns
        if eqn.primitive.name == "scan"
    ]
    ((_, _, inner),) = subjaxprs(eqn.params)
    shapes = [x.aval.shape for x in body(inner).invars]
    outside = [x.aval.shape for x in eqn.invars]
    assert shapes[-2:] == [(2,), (4, 5)]
    assert outside[-2:] == [(2,), (3, 4, 5)] and len(outside) == len(shapes)


def test_scopes_and_lines_are_those_of_the_user():
    def fun(x):
        with jax.named_scope("decoder"), jax.named_scope("wo"):
            return x @ x

    (eqn,) = body(jax.make_jaxpr(fun)(X)).eqns
    assert scope(eqn) == ("decoder", "wo")
    assert source(eqn).startswith("test_jaxpr.py:") and "fun" in source(eqn)
    (eqn,) = body(jax.make_jaxpr(jax.jit(fun))(X)).eqns
    assert title(eqn) == "fun" and title(body(eqn.params["jaxpr"]).eqns[0]) == "dot_general"


def test_an_equation_is_a_function():
    (eqn,) = body(jax.make_jaxpr(lambda x: jax.jit(jnp.add)(x, 2.0))(X)).eqns
    (out,) = function(eqn)(X, jnp.float32(3.0))
    assert_same_bits(out, X + 3.0)


def test_a_jaxpr_keeps_its_constants_when_it_is_replaced():
    constant = jnp.arange(4.0).reshape(2, 2)
    jaxpr = jax.make_jaxpr(lambda x: x + constant)(X)
    same = replace(jaxpr, eqns=body(jaxpr).eqns)
    (out,) = jax.extend.core.jaxpr_as_fun(same)(X)
    assert_same_bits(out, X + constant)


def test_a_variable_in_another_dtype_has_the_same_shape():
    x = body(jax.make_jaxpr(jnp.sin)(X)).invars[0]
    half = var(x, jnp.float16)
    assert half.aval.shape == (2, 2) and nbytes(half) == 8 and nbytes(x) == 16
