"""Logits against transformers, for models that either of the two wrote.

They need an interpreter with torch and transformers: this one, or the one that COAT_TORCH_PYTHON names, such as that of an
environment made with `python -m venv /tmp/venv-torch && /tmp/venv-torch/bin/pip install torch transformers`.
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
