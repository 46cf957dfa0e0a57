"""The Llama of `coat_jax.models.llama` as an NNX module: the same parameters by the same names, the same function of them."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from coat_jax.models import llama
from coat_jax.models.llama import Config
from coat_jax.nnx.parameters import given_recipe, parameters
from coat_jax.ops import Recipe


class Parameters(nnx.Module):
    """A tree of `nnx.Param`s, by the names of a tree of arrays."""

    def __init__(self, tree: Mapping[str, Any]):
        hold(self, tree)


def hold(module: nnx.Module, tree: Mapping[str, Any]) -> None:
    """Gives a module the parameters of a tree of arrays: {"norm": {"scale": x}} becomes module.norm.scale."""
    for name, value in tree.items():
        setattr(module, name, Parameters(value) if isinstance(value, Mapping) else nnx.Param(value))


class Llama(nnx.Module):
    """A Llama language model in Flax NNX.

    Parameters: those of `coat_jax.models.llama.Llama`, the layers stacked: `layers.attention.q.kernel` is (layers, in, out).

    Args:
      config: sizes; see `coat_jax.models.llama.preset`.
      recipe: what the layers quantize and keep; None is `recipes.coat()`.
      remat: as in `coat_jax.models.llama.Llama`.
      params: the parameters, as `coat_jax.pretrained.load` gives them; None draws them.
      rngs: of the initial values, where no `params` are given.

    Raises:
      TypeError: a recipe that is none.
      ValueError: another string as `remat`; neither `params` nor `rngs`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from coat_jax.models import llama, llama_nnx
      >>> model = llama_nnx.Llama(llama.preset("tiny"), rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((1, 16), jnp.int32)).shape
      (1, 16, 256)
    """

    def __init__(
        self,
        config: Config,
        recipe: Recipe | None = None,
        *,
        remat: str | Callable[..., Any] | None = None,
        params: Mapping[str, Any] | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        self.model = llama.Llama(config, given_recipe(self, recipe), remat)
        if params is None:
            if rngs is None:
                raise ValueError("Llama: neither params nor rngs; give rngs=nnx.Rngs(0), or the parameters that were loaded")
            params = self.model.init(rngs.params(), jnp.zeros((1, 8), jnp.int32))["params"]
        hold(self, params)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Float32 logits (batch, tokens, vocabulary) of integer tokens (batch, tokens), or of embeddings in their place."""
        return self._apply(tokens)

    def loss(self, tokens: jax.Array, targets: jax.Array, weights: jax.Array | None = None) -> jax.Array:
        """Mean cross entropy in nats per token, float32; arguments as those of `coat_jax.models.llama.Llama.loss`."""
        return self._apply(tokens, targets, weights, method=self.model.loss)

    def _apply(self, *args: Any, **options: Any) -> Any:
        return self.model.apply({"params": parameters(self)}, *args, **options)
