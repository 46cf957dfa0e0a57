"""Tunix's trainer with `coat_adamw` and FP8 modules. Needs google-tunix, for which `.ci/run` makes an environment."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from coat_jax import recipes
from coat_jax.models import llama, llama_nnx
from coat_jax.optim import coat_adamw

peft_trainer = pytest.importorskip("tunix.sft.peft_trainer", reason="google-tunix is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # Tunix and what it imports warn of many things


class Batches:
    """The same batches every time, as Tunix's trainer counts those that it has seen."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        for i in range(self.count):
            tokens = np.random.default_rng(i).integers(0, 256, (4, 33)).astype(np.int32)
            yield peft_trainer.TrainingInput(input_tokens=tokens, input_mask=np.ones(tokens.shape, np.float32))


def train(steps, folder, accumulate):
    traces = []

    def loss(model, input_tokens, input_mask):
        traces.append(0)
        return model.loss(input_tokens[:, :-1], input_tokens[:, 1:], input_mask[:, 1:])

    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=1000,
        max_steps=steps,
        checkpoint_root_directory=str(folder),
        gradient_accumulation_steps=accumulate,
    )
    model = llama_nnx.Llama(llama.preset("tiny", layers=2), recipes.lean(), rngs=nnx.Rngs(0))
    optimizer = optax.inject_hyperparams(coat_adamw)(learning_rate=1e-3)
    trainer = peft_trainer.PeftTrainer(model, optimizer, config).with_loss_fn(loss)
    trainer.with_gen_model_input_fn(lambda x: {"input_tokens": x.input_tokens, "input_mask": x.input_mask})
    trainer.train(Batches(steps * (accumulate or 1)))
    assert trainer.train_steps == steps and len(traces) == 1
    return nnx.state(trainer.model), nnx.state(trainer.optimizer)


@pytest.mark.parametrize("accumulate", [None, 2])
def test_ten_steps_saved_restored_and_ten_more_are_twenty(accumulate, tmp_path):
    train(10, tmp_path / "a", accumulate)
    resumed, whole = train(20, tmp_path / "a", accumulate), train(20, tmp_path / "b", accumulate)
    leaves = [[x for x in jax.tree.leaves(s) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)] for s in (resumed, whole)]
    assert all(bool((jnp.asarray(a) == jnp.asarray(b)).all()) for a, b in zip(*leaves, strict=True))
    moments = [x for x in jax.tree.leaves(whole[1]) if x.dtype == jnp.float8_e4m3fn]
    assert sum(x.size for x in moments) == 2 * sum(x.size for path, x in nnx.to_flat_state(whole[0]) if path[-1] == "kernel")
