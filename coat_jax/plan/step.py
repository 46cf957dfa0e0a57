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
from coat_jax.plan.compile import compile_for
from coat_jax.plan.program import Program
from coat_jax.plan.setting import Baseline, Setting
from coat_jax.train.llama_parts import parts_of_llama
from coat_jax.train.step import fused_step


@dataclasses.dataclass(frozen=True)
class Step:
    """A step (params, state, tokens) -> (params, state, ...) with its arguments and where they live.

    Attributes:
      fn: the step, not jitted. tokens are int32 (batch, seq + 1): inputs and, one further, targets.
      args: its abstract arguments.
      specs: a tree of `PartitionSpec`s for them over the mesh {"fsdp": gpus}.
    """

    fn: Callable[..., Any]
    args: tuple[Any, Any, Any]
    specs: tuple[Any, Any, Any]

    def compile(self, setting: Setting) -> Program:
        """The program for the setting's GPUs, with parameters and state donated, given all the memory that it wants."""
        placed = (self.specs[0], self.specs[1], None) if setting.gpus > 1 else None
        return compile_for(
            setting.device,
            self.fn,
            *self.args,
            gpus=setting.gpus,
            donate_argnums=(0, 1),
            in_shardings=self.specs,
            out_shardings=placed,
        )


def optimizer(setting: Setting) -> optax.GradientTransformation:
    """AdamW as Llama 2 was trained: b1 0.9, b2 0.95, weight decay 0.1."""
    if setting.codec == Baseline.OPTAX:
        return optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)
    return coat_adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1, codec=codecs.named(setting.codec))


def model_of(setting: Setting) -> Any:
    """The Flax module."""
    if setting.recipe == Baseline.PLAIN:
        return plain.Llama(setting.config, plain.Remat(setting.remat), "cudnn")
    return llama.Llama(setting.config, recipes.named(setting.recipe))


def training_step(setting: Setting) -> Step:
    """The step that `setting` describes."""
    model, tx = model_of(setting), optimizer(setting)
    tokens = jax.ShapeDtypeStruct((setting.batch, setting.seq + 1), jnp.int32)
    # cuDNN's attention takes no arrays of the CPU's; parameters are the same without it.
    declared = plain.Llama(setting.config) if setting.recipe == Baseline.PLAIN else model
    params = jax.eval_shape(lambda: declared.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"])
    step: Any
    if setting.fused:
        step = fused_step(parts_of_llama(model), tx)
        state = jax.eval_shape(step.init, params)
    else:
        step, state = _ordinary(model, tx), jax.eval_shape(tx.init, params)
    placed = fsdp_specs(params, setting.gpus)
    moments = state_specs(state, params, placed, {"fsdp": setting.gpus})
    return Step(step, (params, state, tokens), (placed, moments, batch_spec()))


def _ordinary(model: Any, tx: optax.GradientTransformation) -> Callable[..., Any]:
    """The step that everyone writes: gradients of all parameters, then the optimizer."""

    def step(params, state, tokens):
        def loss(params):
            return model.apply({"params": params}, tokens[:, :-1], tokens[:, 1:], method=model.loss)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step
