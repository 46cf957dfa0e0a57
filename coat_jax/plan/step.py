"""The training step that a `Setting` describes, ready to be compiled."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from coat_jax import recipes
from coat_jax.models import llama, plain
from coat_jax.optim import coat_adamw, codecs, state_specs
from coat_jax.parallel import batch_spec, fsdp_specs
from coat_jax.plan.setting import Baseline, Setting


@dataclasses.dataclass(frozen=True)
class Step:
    """A step (params, state, tokens, targets) -> (params, state, loss) with its arguments and their sharding.

    Attributes:
      fn: the step, not jitted.
      args: its abstract arguments.
      specs: a tree of `PartitionSpec`s for them over the mesh {"fsdp": gpus}.
      results: likewise for its results.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    specs: tuple[Any, ...]
    results: tuple[Any, ...]


def optimizer(setting: Setting) -> optax.GradientTransformation:
    """AdamW as Llama 2 was trained: b1 0.9, b2 0.95, weight decay 0.1."""
    if setting.codec == Baseline.OPTAX:
        return optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)
    return coat_adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1, codec=codecs.named(setting.codec))


def model_of(setting: Setting) -> Any:
    """The Flax module."""
    if setting.recipe == Baseline.PLAIN:
        return plain.Llama(setting.config, plain.Remat(setting.remat), "cudnn")
    return llama.Llama(setting.config, recipes.named(setting.recipe), remat=setting.remat)


def training_step(setting: Setting) -> Step:
    """The step that `setting` describes."""
    model, tx = model_of(setting), optimizer(setting)
    tokens = jax.ShapeDtypeStruct((setting.batch, setting.seq), jnp.int32)
    few = jnp.zeros((1, 2), jnp.int32)
    shape_model = plain.Llama(setting.config) if setting.recipe == Baseline.PLAIN else model
    params = jax.eval_shape(lambda: shape_model.init(jax.random.key(0), few)["params"])
    state = jax.eval_shape(tx.init, params)

    def step(params, state, tokens, targets):
        def loss(params):
            return model.apply({"params": params}, tokens, targets, method=model.loss)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    placed = fsdp_specs(params, setting.gpus)
    moments = state_specs(state, params, placed, {"fsdp": setting.gpus})
    specs = (placed, moments, batch_spec(), batch_spec())
    return Step(step, (params, state, tokens, tokens), specs, (placed, moments, None))
