"""The table of tensors is that of the model's own parameters."""

import jax
import pytest
from small_models import CONFIGS, shapes

from coat_jax.models import llama
from coat_jax.pretrained.leaves import leaves_of

CASES = CONFIGS | {name: config for name, config in llama.presets().items() if config.norm == "rms"}


@pytest.mark.parametrize("name", CASES)
def test_the_paths_and_shapes_are_those_of_the_model(name):
    want = {tuple(key.key for key in path): leaf.shape for path, leaf in jax.tree.leaves_with_path(shapes(CASES[name]))}
    leaves = leaves_of(CASES[name])
    assert {leaf.path: leaf.shape for leaf in leaves} == want
    names = [name for leaf in leaves for name in leaf.names()]
    assert len(set(names)) == len(names)


def test_names_are_those_of_hugging_face():
    names = {next(leaf.names()) for config in CONFIGS.values() for leaf in leaves_of(config)}
    layer = [f"self_attn.{n}_proj.{kind}" for n in "qkvo" for kind in ("weight", "bias")]
    layer += ["self_attn.q_norm.weight", "self_attn.k_norm.weight", *(f"mlp.{n}_proj.weight" for n in ("gate", "up", "down"))]
    layer += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    outer = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert names == outer | {f"model.layers.0.{name}" for name in layer}
