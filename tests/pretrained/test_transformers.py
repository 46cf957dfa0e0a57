"""Logits against transformers, for models that either of the two wrote.

They need an interpreter with torch, transformers, compressed-tensors and accelerate: this one, or the one that
COAT_TORCH_PYTHON names, such as that of an environment that holds these four and nothing of this library.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import pretrained, recipes
from coat_jax.models import llama
from coat_jax.pretrained.folder import tensors_of
from coat_jax.pretrained.leaves import leaves_of

HERE = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
PYTHON = os.environ.get("COAT_TORCH_PYTHON", sys.executable if HERE else "")
SCRIPT = pathlib.Path(__file__).with_name("make_hf_models.py")
NAMES = ("llama", "llama_tied_sharded_scaled", "llama_biased", "mistral", "qwen2", "qwen2_tied", "qwen3", "qwen3_tied")

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="torch and transformers are not installed; see COAT_TORCH_PYTHON"),
    pytest.mark.xdist_group("transformers"),
]


def transformers(command, folder):
    done = subprocess.run([PYTHON, str(SCRIPT), command, str(folder)], capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr[-2000:]


@pytest.fixture(scope="module", name="models")
def models_by_transformers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    transformers("make", folder)
    return folder


def agree(config, params, folder):
    """Float32 logits within 1e-5 of the largest one, and the same greatest one at every position.

    Sums of up to 128 terms in another order are off by some 2^-24 x 10 each, through three layers of some ten of them: 2e-6.
    """
    tokens, want = np.load(folder / "tokens.npy"), np.load(folder / "logits.npy")
    model = llama.Llama(config, recipes.bf16())
    got = np.asarray(jax.jit(lambda params: model.apply({"params": params}, tokens))(params))
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
    np.testing.assert_array_equal(got.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_what_transformers_wrote(models, name):
    agree(*pretrained.load(models / name, dtype=jnp.float32), models / name)


@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_what_is_saved(models, name, tmp_path):
    config, params = pretrained.load(models / name, dtype=jnp.float32)
    params = jax.tree.map(lambda x: x * 1.01, params)
    like = {"like": models / name} if "tied" in name else {}
    pretrained.save(tmp_path, config, params, file_bytes=10**9 if "tied" in name else 60_000, **like)
    (tmp_path / "tokens.npy").write_bytes((models / name / "tokens.npy").read_bytes())
    transformers("logits", tmp_path)
    agree(config, params, tmp_path)


@pytest.mark.parametrize("format", ["compressed-tensors-channel", "compressed-tensors-block", "deepseek-blocks"])
def test_transformers_reads_an_export_as_the_weights_that_it_means(format, tmp_path):
    """Weights decoded by NumPy give our model the logits that transformers' decoded ones give it."""
    config = llama.preset("llama3.1-8b", vocab_size=128, hidden=256, intermediate=384, layers=2, heads=2, kv_heads=1)
    config = dataclasses.replace(config, dtype=jnp.float32)
    params = llama.Llama(config).init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)  # what is not quantized is stored so
    pretrained.export(tmp_path / "out", config, params, format=format)
    np.save(tmp_path / "out" / "tokens.npy", np.random.default_rng(0).integers(0, 128, (2, 48)))
    transformers("logits", tmp_path / "out")
    found = tensors_of(tmp_path / "out")
    for leaf in leaves_of(config):
        if leaf.path[0] == "layers" and leaf.path[-1] == "kernel":
            layers = np.stack([leaf.turned(decoded(found, name)) for name in leaf.names()])
            params["layers"][leaf.path[1]][leaf.path[2]]["kernel"] = jnp.asarray(layers)
    agree(config, params, tmp_path / "out")


def decoded(tensors, name):
    """code * scale, each scale over its 128 x 128 or its row."""
    scale = next(tensors[f"{name}_{kind}"] for kind in ("scale", "scale_inv") if f"{name}_{kind}" in tensors).mapped()
    codes = np.asarray(tensors[name].mapped()).astype(np.float32)
    blocks = [n // m for n, m in zip(codes.shape, scale.shape, strict=True)]
    return codes * np.repeat(np.repeat(scale, blocks[0], 0), blocks[1], 1)


def test_the_scaled_rotation_matters_and_both_spellings_of_it_are_one(models, tmp_path):
    folder = models / "llama_tied_sharded_scaled"
    config, params = pretrained.load(folder, dtype=jnp.float32)
    with pytest.raises(AssertionError):
        agree(dataclasses.replace(config, rope_scaling=None), params, folder)
    document = json.loads((folder / "config.json").read_text())
    rope = document.pop("rope_parameters")
    document |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": document.pop("dtype")}
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert pretrained.read_config(tmp_path) == pretrained.read_config(folder)
