"""Reading traced functions: what an equation of a jaxpr calls, all equations inside one, and evaluation by a rule.

A jaxpr is the list of equations that `jax.make_jaxpr` makes of a function. Some equations hold jaxprs of their own:

    jit(f)(x)               {jaxpr: f's}              called once, input for input: `called`
    scan(f, x, length=3)    {jaxpr: f's, length: 3}   run three times, results come back as inputs: `inside`, 3 times
    by_target(kernel, f)    {functions: Untraced}     functions that are traced when a program's target is known
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

Function = Callable[..., Any]
Rule = Callable[[core.JaxprEqn, list[Any]], Sequence[Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Untraced:
    """Functions for the same results, held by an equation until its program is lowered.

    Attributes:
      kernel: for a Hopper GPU.
      plain: a function in JAX's own operations, or None where there is the kernel only.
    """

    kernel: Function
    plain: Any = None


def called(equation: core.JaxprEqn) -> tuple[core.Jaxpr, Sequence[Any]] | None:
    """The jaxpr, and its constants, that an equation calls once and input for input; None where it is no plain call.

    `jit`, `checkpoint`, `shard_map` and functions with derivatives of their own are calls; of `Untraced` functions it is the
    plain one.
    """
    closed = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    for held in equation.params.values():
        if isinstance(held, Untraced) and held.plain is not None:
            closed = jax.make_jaxpr(held.plain)(*(atom.aval for atom in equation.invars))
    jaxpr: Any = getattr(closed, "jaxpr", closed)
    if not hasattr(jaxpr, "eqns") or "length" in equation.params:  # a scan's results come back as inputs
        return None
    given, taken = ([getattr(atom.aval, "ndim", 0) for atom in atoms] for atoms in (equation.invars, jaxpr.invars))
    # `reduce` holds the function of two numbers that it applies between elements: not what its arrays are given to.
    return (jaxpr, getattr(closed, "consts", ())) if given == taken else None


def inside(equation: core.JaxprEqn) -> Iterator[tuple[core.Jaxpr, int]]:
    """Every jaxpr that an equation holds, and how often it runs that: `length` times in a scan, else once.

    Of a `while`, whose trips nobody knows, and of both branches of a `cond` it says once. Of `Untraced` functions it is the
    kernel.
    """
    for held in jax.tree.leaves(list(equation.params.values())):
        if isinstance(held, Untraced):
            held = jax.make_jaxpr(held.kernel)(*(atom.aval for atom in equation.invars))
        jaxpr: Any = getattr(held, "jaxpr", held)
        if hasattr(jaxpr, "eqns"):
            yield jaxpr, equation.params.get("length", 1)


def equations(jaxpr: core.Jaxpr) -> Iterator[tuple[core.JaxprEqn, int]]:
    """Every equation of a jaxpr and of those `inside` it, and how often it runs.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> made = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 5, lambda i, x: jnp.sin(x), x))(1.0)
      >>> [times for equation, times in equations(made.jaxpr) if equation.primitive.name == "sin"]
      [5]
    """
    for equation in jaxpr.eqns:
        yield equation, 1
        for held, times in inside(equation):
            yield from ((below, times * count) for below, count in equations(held))


def follow(
    jaxpr: core.Jaxpr, consts: Sequence[Any], inputs: Sequence[Any], rule: Rule, constant: Function = lambda x: x
) -> list[Any]:
    """What a jaxpr's outputs are, where `rule` says what each equation makes of its inputs; calls are followed inside.

    Args:
      jaxpr, consts: a traced function.
      inputs: one thing for each input: arrays, where the rule computes, or whatever else is known of them.
      rule: equation, things -> a thing for each of its results.
      constant: what stands for a constant.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> made = jax.make_jaxpr(lambda x, y: jnp.sin(x) * 2 + y)(1.0, 1.0)
      >>> rule = lambda equation, given: [f"{equation.primitive}({', '.join(map(str, given))})"]
      >>> follow(made.jaxpr, made.consts, ["x", "y"], rule)
      ['add(mul(sin(x), 2.0), y)']
    """
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*map(constant, consts), *inputs], strict=True))

    def read(atom: Any) -> Any:
        return constant(atom.val) if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        inner = called(equation)
        results = rule(equation, given) if inner is None else follow(*inner, given, rule, constant)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
