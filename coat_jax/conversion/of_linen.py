"""Conversion of Linen models: a module that runs the model and computes its layers in FP8, with their own parameters."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax
import jax
from flax import linen as nn

from coat_jax import linen as fp8
from coat_jax.conversion.kept import kept_bytes
from coat_jax.conversion.rules import KEEP, Report, Rules, Swap, SwiGLU, rule_of
from coat_jax.ops import Recipe, blocks

CLASSES: Mapping[type[nn.Module], type[nn.Module]] = {
    nn.Dense: fp8.FP8Dense,
    nn.DenseGeneral: fp8.FP8DenseGeneral,
    nn.Embed: fp8.FP8Embed,
    nn.RMSNorm: fp8.FP8RMSNorm,
    nn.LayerNorm: fp8.FP8LayerNorm,
    nn.MultiHeadDotProductAttention: fp8.FP8MultiHeadAttention,
}


class Converted(nn.Module):
    """A Linen model whose layers compute in FP8. Its parameters, their names and initial values are the model's.

    Attributes:
      model: the model itself.
      rules: pairs of a path pattern and a rule, the last of them for every path.
      recipe: for a rule without one.
    """

    model: nn.Module
    rules: tuple[tuple[str, Any], ...]
    recipe: Recipe

    def setup(self) -> None:
        """The parameters are those of the model, not one level below."""
        nn.share_scope(self, self.model)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """What the model computes."""
        with nn.intercept_methods(Swapping(dict(self.rules), self.recipe, len(self.path))):
            return self.model(*args, **options)


class Swapping:
    """What Flax calls in place of each method of a module: `__call__` of a layer is that of its FP8 namesake.

    Args:
      rules: of paths.
      recipe: for a rule without one.
      depth: names of the path that the model itself has.
      swaps: where what happens is told, by path.
    """

    def __init__(self, rules: Rules, recipe: Recipe, depth: int, swaps: dict[str, Swap | None] | None = None):
        self.rules, self.recipe, self.depth = rules, recipe, depth
        self.swaps: dict[str, Swap | None] = {} if swaps is None else swaps
        self.inside = False

    def __call__(self, call: Callable[..., Any], args: Any, options: Any, context: nn.module.InterceptorContext) -> Any:
        """Runs a method."""
        module = context.module
        if context.method_name != "__call__" or self.inside:
            return call(*args, **options)
        path = "/".join(module.path[self.depth :])
        rule = rule_of(path, self.rules)
        swap = self.swaps[path] = _swap(path, module, rule)
        if swap is None or swap.became is None:
            return call(*args, **options)
        self.inside = True  # the layer of ours is a method too, and may hold others
        try:
            if isinstance(rule, SwiGLU):
                return call(*args, **options) if module.is_initializing() else _swiglu(module, rule, self.recipe, *args)
            return _as(CLASSES[type(module)], module, rule, args, options)
        finally:
            self.inside = False


def convert(model: nn.Module, rules: Rules, recipe: Recipe, inputs: Sequence[Any]) -> tuple[Any, Report, list[str]]:
    """The converted model, the report, and the paths of all modules."""
    converted = Converted(model, tuple(rules.items()), recipe)
    swaps: dict[str, Swap | None] = {}

    def seen(*inputs: Any) -> Any:
        with nn.intercept_methods(Swapping(rules, recipe, 0, swaps)):
            return model.init(jax.random.key(0), *inputs)

    variables = jax.eval_shape(seen, *inputs)
    rest, params = flax.core.pop(variables, "params")

    def kept(m: nn.Module) -> int:
        return kept_bytes(lambda params, *xs: m.apply({**rest, "params": params}, *xs), params, inputs)

    told = tuple(swap for swap in swaps.values() if swap is not None)
    return converted, Report(told, kept(model), kept(converted)), [path for path in swaps if path]


def _swap(path: str, module: nn.Module, rule: Any) -> Swap | None:
    was = type(module).__name__
    if isinstance(rule, SwiGLU):
        return Swap(path, was, "FP8SwiGLU")
    ours = CLASSES.get(type(module))
    if ours is None:
        plain = next((plain for plain in CLASSES if isinstance(module, plain)), None)
        if plain is None or type(module) in CLASSES.values():
            return None
        return Swap(path, was, None, f"a class of its own, which is a {plain.__name__}; coat_jax.dot_general goes into it")
    if rule == KEEP:
        return Swap(path, was, None, 'rule "keep"')
    own = [name for name in ("dot_general", "dot_general_cls") if getattr(module, name, None) is not None]
    if own:
        return Swap(path, was, None, f"a {own[0]} of its own")
    if isinstance(module, nn.MultiHeadDotProductAttention):
        for name, usual in (("dropout_rate", 0.0), ("decode", False), ("attention_fn", nn.dot_product_attention)):
            if getattr(module, name) != usual:
                return Swap(path, was, None, f"{name}={getattr(module, name)!r}; its layers are swapped")
    return Swap(path, was, ours.__name__)


def _as(ours: type[nn.Module], module: nn.Module, recipe: Any, args: Any, options: Any) -> Any:
    """What a module of the class `ours` with this module's attributes and parameters computes."""
    plain, given = type(module), {"__class__": ours, "recipe": recipe, "causal": False}
    for name, value in given.items():
        object.__setattr__(module, name, value)  # modules are frozen while they run
    try:
        return module(*args, **options)
    finally:
        object.__setattr__(module, "__class__", plain)


def _swiglu(module: nn.Module, rule: SwiGLU, recipe: Recipe, x: jax.Array) -> jax.Array:
    held = module.variables["params"]
    params = {}
    for name in ("gate", "up", "down"):
        own = getattr(rule, name)
        if set(held.get(own, ())) != {"kernel"}:
            raise ValueError(
                f"convert: {'/'.join(module.path)} has no layer {own!r} with a kernel alone; name its three in SwiGLU(...)"
            )
        params[name] = dict(held[own])
    return blocks.swiglu_mlp(params, x, rule.recipe or recipe)
