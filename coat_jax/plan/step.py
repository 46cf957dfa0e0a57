"""The training step that a `PlanConfig` describes, ready to be compiled."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from coat_jax import recipes
from coat_jax.compiled.compile import compile_for
from coat_jax.compiled.program import Program
from coat_jax.fused_step.llama import layered_llama
from coat_jax.fused_step.step import fused_step, ordinary_step
from coat_jax.models import llama, plain
from coat_jax.optim import coat_adamw, codecs, state_specs
from coat_jax.parallel import batch_spec, fsdp_specs
from coat_jax.plan.config import Baseline, PlanConfig
from coat_jax.train.step import OrdinaryStep


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """A step (params, state, tokens) -> (params, state, ...) with its arguments and where they live.

    Attributes:
      fn: the step, not jitted. tokens are int32 (batch, seq + 1): inputs and, one further, targets.
      args: its abstract arguments.
      specs: a tree of `PartitionSpec`s for them over the mesh {"fsdp": gpus}.
    """

    fn: Callable[..., Any]
    args: tuple[Any, Any, Any]
    specs: tuple[Any, Any, Any]

    def compile(self, setting: PlanConfig) -> Program:
        """The program for the setting's GPUs, with parameters and state donated, given all the memory that it wants."""
        placed = (self.specs[0], self.specs[1], None) if setting.gpus > 1 else None
        return compile_for(
            setting.gpu,
            self.fn,
            *self.args,
            gpus=setting.gpus,
            donate_argnums=(0, 1),
            in_shardings=self.specs,
            out_shardings=placed,
        )


def optimizer(setting: PlanConfig) -> optax.GradientTransformation:
    """AdamW as Llama 2 was trained: b1 0.9, b2 0.95, weight decay 0.1."""
    if setting.codec == Baseline.OPTAX:
        return optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)
    kept = codecs.named(setting.codec)
    return coat_adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1, codec=kept, master=setting.master)


def training_step(setting: PlanConfig) -> PlannedStep:
    """The step that `setting` describes."""
    tx = optimizer(setting)
    tokens = jax.ShapeDtypeStruct((setting.batch, setting.seq + 1), jnp.int32)
    step: Any
    if setting.recipe == Baseline.PLAIN:
        model: Any = plain.Llama(setting.config, plain.Remat(setting.remat), "cudnn")
        # cuDNN's attention takes no arrays of a CPU; parameters are the same without it.
        declared: Any = plain.Llama(setting.config)

        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            return model.apply({"params": params}, tokens[:, :-1], tokens[:, 1:], method=model.loss)

        step = OrdinaryStep(loss, tx)
    else:
        remat = "layer" if setting.remat == plain.Remat.LAYER else None
        model = declared = llama.Llama(setting.config, recipes.named(setting.recipe), remat=remat)
        make = fused_step if setting.fused else ordinary_step
        step = make(layered_llama(model), tx)
    params = jax.eval_shape(lambda: declared.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"])
    state = jax.eval_shape(step.init, params)
    placed = fsdp_specs(params, setting.gpus)
    moments = state_specs(state, params, placed, {"fsdp": setting.gpus})
    return PlannedStep(step, (params, state, tokens), (placed, moments, batch_spec()))
