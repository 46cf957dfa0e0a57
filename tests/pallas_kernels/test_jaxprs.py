"""Reading jaxprs: what is a call, how often equations run, and that a function followed by its equations is the function."""

import functools

import jax
import jax.numpy as jnp
import pytest
from interpreting import numbers_like, same_bytes

from pallas_kernels import jaxprs
from pallas_kernels.dispatch import by_target


def names(function, *args):
    """What each call of a rule sees, calls followed inside."""
    made, seen = jax.make_jaxpr(function)(*args), []

    def rule(equation, inputs):
        seen.append(equation.primitive.name)
        return [None] * len(equation.outvars)

    jaxprs.follow(made.jaxpr, made.consts, [None] * len(made.jaxpr.invars), rule)
    return seen


@jax.custom_vjp
def with_gradient(x):
    return jnp.sin(x)


with_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g,))
on_a_device = functools.partial(
    jax.shard_map, mesh=jax.make_mesh((1,), ("a",), (jax.sharding.AxisType.Auto,)), in_specs=jax.P("a"), out_specs=jax.P("a")
)
CALLS = {
    "jit": jax.jit(jnp.sin),
    "checkpoint": jax.checkpoint(jnp.sin),
    "custom_vjp": with_gradient,
    "shard_map": on_a_device(jnp.sin),
    "kernel_by_target": lambda x: by_target(lambda x: (jnp.cos(x),), lambda x: (jnp.sin(x),), x),
}
NO_CALLS = {
    "scan": lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=3)[0],
    "while": lambda x: jax.lax.while_loop(lambda x: x.sum() < 3, jnp.sin, x),
    "reduce": lambda x: jax.lax.reduce((x,), (jnp.float32(0),), lambda a, b: (jnp.sin(a[0]) + b[0],), (0,)),
}


@pytest.mark.parametrize("function", CALLS.values(), ids=CALLS)
def test_a_call_is_followed(function):
    assert names(function, jnp.ones(4)) == ["sin"]


@pytest.mark.parametrize("function", NO_CALLS.values(), ids=NO_CALLS)
def test_what_runs_another_number_of_times_is_no_call(function):
    assert "sin" not in names(function, jnp.ones(4))


def test_equations_are_counted_as_often_as_they_run_and_kernels_instead_of_plain_functions():
    def twice(x):
        def body(x, _):
            return by_target(jnp.cos, jnp.sin, jax.lax.fori_loop(0, 3, lambda i, x: jnp.exp(x), x)), None

        return jax.jit(lambda x: jax.lax.scan(body, x, length=2)[0])(x)

    found = [(e.primitive.name, times) for e, times in jaxprs.equations(jax.make_jaxpr(twice)(jnp.ones(4)).jaxpr)]
    assert found.count(("exp", 6)) == found.count(("cos", 2)) == 1
    assert not any(name == "sin" for name, _ in found)


def test_a_function_evaluated_equation_by_equation_is_the_function():
    def function(x, y):
        return jax.nn.silu(x) @ y, jax.nn.softmax(y) * 3

    def rule(equation, inputs):
        made = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
        return made if equation.primitive.multiple_results else [made]

    args = numbers_like((4, 8)), numbers_like((8, 3), 1)
    made = jax.make_jaxpr(function)(*args)
    same_bytes(jaxprs.follow(made.jaxpr, made.consts, args, rule), function(*args))
