"""A small Llama trained on real text with each codec, and the error of storing the moments of such a run."""

import dataclasses
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from coat_jax import recipes
from coat_jax.models import llama
from coat_jax.optim import MomentCodec, coat_adamw, codecs
from coat_jax.optim.convert import from_adamw, to_adamw
from coat_jax.optim.diagnostics import adam_states, moment_error
from coat_jax.studies.variants import StudyConfig
from coat_jax.train import data as text
from coat_jax.train.loop import State, Trainer, Variant

PERTURBATION = 1e-6
"""Relative change of the initial parameters that shows how far two runs in float32 end from each other."""


@dataclasses.dataclass(frozen=True)
class Study:
    """Trains with one codec after the other; a codec is compiled once for all seeds.

    Attributes:
      settings: model, steps, batch and schedule, as in `coat-jax compare`; the arithmetic of the model is BF16.
      corpus: the text.
    """

    settings: StudyConfig
    corpus: text.Corpus

    def trainer(self, codec: MomentCodec) -> Trainer:
        """Llama in BF16 with AdamW as Llama was trained, moments stored by `codec`."""
        model = llama.Llama(self.settings.model_config, recipe=recipes.bf16())
        adamw = coat_adamw(self.settings.schedule, b1=0.9, b2=0.95, weight_decay=0.1, codec=codec)
        variant = Variant.of_model(str(codec.nu), model, optax.chain(optax.clip_by_global_norm(1.0), adamw))
        return Trainer(variant, np.zeros((self.settings.batch, self.settings.seq + 1), np.int32))

    def run(self, trainer: Trainer, seed: int, *, perturbed: bool, advance: Callable[[], Any]) -> tuple[dict[str, Any], State]:
        """One run: its losses, and the state at its end.

        Args:
          trainer: of a codec.
          seed: of initial values and batches.
          perturbed: whether initial parameters are changed by `PERTURBATION`.
          advance: called after every step.
        """
        state = trainer.start(seed)
        if perturbed:
            state = state._replace(params=_perturb(state.params, seed))
        windows = text.Windows(self.corpus.train, self.settings.seq).batches(self.settings.batch, seed)
        losses, seconds = [], []
        for step in trainer.train(state, itertools.islice(windows, self.settings.steps)):
            state = step.state
            losses.append(step.loss)
            seconds.append(step.seconds)
            advance()
        held_out = text.Windows(self.corpus.validation, self.settings.seq).batches(self.settings.batch, seed=0)
        validation = trainer.evaluate(state.params, itertools.islice(held_out, self.settings.validation_batches))
        late = losses[-max(1, self.settings.steps // 10) :]
        row = {"validation_loss": validation, "training_loss": statistics.fmean(late), "seconds": round(sum(seconds), 1)}
        return row, state


def _perturb(params: Any, seed: int) -> Any:
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1000), len(leaves))
    changed = [x * (1 + PERTURBATION * jax.random.normal(key, x.shape)) for x, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, changed)


def real_moments(state: State) -> dict[str, Any]:
    """Relative L2 error of the update when the float32 moments of a run are stored once by each codec, zeros left out.

    Args:
      state: of a run with `codecs.FLOAT32`.
    """
    reference = to_adamw(state.opt_state, codecs.FLOAT32)
    nodes = jax.tree.leaves(reference, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState))
    (truth,) = (node for node in nodes if isinstance(node, optax.ScaleByAdamState))
    errors = {}
    for name in codecs.names():
        codec = codecs.named(name)
        if codec.quantizes:
            (stored,) = adam_states(from_adamw(reference, codec))
            errors[name] = moment_error(stored, truth, codec)
    rows = {name: {key: float(value) for key, value in error._asdict().items()} for name, error in errors.items()}
    gain = (rows["plain_fp8"]["update"] / rows["coat"]["update"]) ** 2
    return {"relative_error": rows, "mean_squared_error_plain_fp8_over_coat": gain}


def bytes_per_parameter(codec: MomentCodec) -> float:
    """Bytes of both moments per element of a quantized leaf whose last axis is a multiple of the group."""
    leaf = {"kernel": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    state = jax.eval_shape(coat_adamw(1.0, codec=codec).init, leaf)[0]
    moments = jax.tree.leaves((state.mu, state.nu))
    return sum(x.size * np.dtype(x.dtype).itemsize for x in moments) / (1024 * 1024)
