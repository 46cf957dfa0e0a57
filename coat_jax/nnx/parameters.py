"""Recipes and parameters of NNX modules."""

from typing import Any, TypeVar

import jax
from flax import nnx

from coat_jax import recipes
from coat_jax.ops import Recipe
from coat_jax.ops.recipe import check_recipe

Module = TypeVar("Module", bound=nnx.Module)


def given_recipe(module: Any, recipe: Recipe | None) -> Recipe:
    """The recipe of a module, `recipes.coat()` where none is given.

    Raises:
      TypeError: it is a name or something else.
    """
    return recipes.coat() if recipe is None else check_recipe(type(module).__name__, recipe)


def takes_recipe(cls: type[Module]) -> type[Module]:
    """A class that takes `recipe` besides the arguments of the Flax module that it stands for.

    A decorator and no base: an object of the Flax class can then become one of ours.
    """

    def init(self: Any, *args: Any, recipe: Recipe | None = None, **options: Any) -> None:
        self.recipe = given_recipe(self, recipe)
        super(cls, self).__init__(*args, **options)

    cls.__init__ = init  # type: ignore[method-assign]
    return cls


def array(param: nnx.Variable | None) -> jax.Array | None:
    """The value of a parameter that may be absent."""
    return None if param is None else param[...]


def parameters(module: Any) -> dict[str, Any]:
    """The parameters of a module as functions of `coat_jax.ops` take them: {"up": {"kernel": ..., "bias": ...}, ...}."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if isinstance(value, nnx.Param):
            found[name] = value[...]
        elif isinstance(value, nnx.Module) and (inner := parameters(value)):
            found[name] = inner
    return found
