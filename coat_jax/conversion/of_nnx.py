"""Conversion of NNX models: a copy whose layers have another class, and the same variables."""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

import coat_jax.nnx as fp8
from coat_jax.conversion.kept import kept_bytes
from coat_jax.conversion.rules import KEEP, Report, Rules, Swap, SwiGLU, rule_of
from coat_jax.nnx.parameters import parameters
from coat_jax.ops import Recipe, blocks
from coat_jax.ops.layer_hooks import einsum

CLASSES: tuple[tuple[type[nnx.Module], type[nnx.Module]], ...] = (
    (nnx.Linear, fp8.FP8Linear),
    (nnx.LinearGeneral, fp8.FP8LinearGeneral),
    (nnx.Embed, fp8.FP8Embed),
    (nnx.RMSNorm, fp8.FP8RMSNorm),
    (nnx.LayerNorm, fp8.FP8LayerNorm),
    (nnx.MultiHeadAttention, fp8.FP8MultiHeadAttention),
)


def convert(model: nnx.Module, rules: Rules, recipe: Recipe, inputs: Sequence[Any] | None) -> tuple[Any, Report, list[str]]:
    """A converted copy of the model, the report, and the paths of all modules."""
    copy = nnx.clone(model)
    modules = [("/".join(map(str, path)), module) for path, module in nnx.iter_modules(copy)]
    modules.sort(key=lambda pair: pair[0].count("/"))  # what holds others comes before them
    swaps: dict[str, Swap] = {}
    whole: list[str] = []
    for path, module in modules:
        if any(path.startswith(f"{above}/") for above in whole):
            continue
        found = _swap(path, module, rule_of(path, rules), recipe)
        if found is not None:
            swaps[path] = found
            if found.became is not None:
                whole.append(path)
    paths = [path for path, _ in nnx_order(copy)]
    report = tuple(swaps[path] for path in paths if path in swaps)
    if inputs is None:
        return copy, Report(report), paths
    before, after = (kept_bytes(*_function(m), inputs) for m in (model, copy))
    return copy, Report(report, before, after), paths


def nnx_order(model: nnx.Module) -> list[tuple[str, nnx.Module]]:
    """Paths and modules, in the order of their names."""
    found = [(tuple(path), module) for path, module in nnx.iter_modules(model)]
    found.sort(key=lambda pair: [(isinstance(part, str), part) for part in pair[0]])
    return [("/".join(map(str, path)), module) for path, module in found]


def _swap(path: str, module: nnx.Module, rule: Any, recipe: Recipe) -> Swap | None:
    """Swaps one module where it is; None for one that is no layer."""
    was = type(module).__name__
    if isinstance(rule, SwiGLU):
        names = (rule.gate, rule.up, rule.down)
        missing = [name for name in names if type(getattr(module, name, None)) is not nnx.Linear]
        if missing or any(getattr(module, name).bias is not None for name in names):
            wanted = f"SwiGLU needs nnx.Linear without bias at {', '.join(names)}"
            return Swap(path, was, None, wanted)
        module.__class__ = _swiglu(type(module), names)
        module.coat_recipe = rule.recipe or recipe  # type: ignore[attr-defined]
        return Swap(path, was, "FP8SwiGLU")
    if type(module) is nnx.Einsum:
        if rule == KEEP:
            return Swap(path, was, None, 'rule "keep"')
        module.einsum_op = einsum(rule)
        return Swap(path, was, "FP8Einsum")
    for plain, ours in CLASSES:
        if type(module) is plain:
            if rule == KEEP:
                return Swap(path, was, None, 'rule "keep"')
            if (why := _beyond(module)) is not None:
                return Swap(path, was, None, why)
            module.__class__ = ours
            module.recipe = rule  # type: ignore[attr-defined]
            return Swap(path, was, ours.__name__)
        if isinstance(module, plain) and type(module) is not ours:
            return Swap(
                path, was, None, f"a class of its own; give it dot_general=coat_jax.dot_general(recipe) ({plain.__name__})"
            )
    return None


def _beyond(module: nnx.Module) -> str | None:
    """Why a module has no FP8 form as it was made, or None. The layers of an attention are then swapped one by one."""
    if isinstance(module, nnx.MultiHeadAttention):
        if module.dropout_rate > 0:
            return f"dropout_rate={module.dropout_rate}; its layers are swapped"
        if module.decode:
            return "decode=True; its layers are swapped"
        if module.attention_fn is not nnx.dot_product_attention:
            return "an attention_fn of its own; its layers are swapped"
    product = getattr(module, "dot_general", None)
    if product is not None and product is not jax.lax.dot_general:
        return f"a dot_general of its own, {product!r}"
    return None


def _swiglu(base: type[nnx.Module], names: tuple[str, str, str]) -> type[nnx.Module]:
    """A class like `base` that computes as a SwiGLU of three of its layers."""

    def call(self: Any, x: jax.Array) -> jax.Array:
        held = parameters(self)
        params = {name: held[own] for name, own in zip(("gate", "up", "down"), names, strict=True)}
        return blocks.swiglu_mlp(params, x, self.coat_recipe)

    return type(f"{base.__name__}InFP8", (base,), {"__call__": call, "__doc__": base.__doc__})


def _function(model: nnx.Module) -> tuple[Any, Any]:
    graph, params, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
    return (lambda params, *inputs: nnx.merge(graph, params, rest)(*inputs)), params
