"""Exports hold the codes that their formats define, by NumPy alone, and transformers reads the weights that they mean."""

import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from coat_jax import pretrained
from coat_jax.models import llama
from coat_jax.pretrained.folder import tensors_of

CONFIG = llama.preset(
    "qwen2.5-0.5b", vocab_size=96, hidden=256, intermediate=384, layers=2, heads=2, kv_heads=1, param_dtype=jnp.float32
)
FORMATS = ("compressed-tensors-channel", "compressed-tensors-block", "deepseek-blocks")


@pytest.fixture(scope="module")
def params():
    made = llama.Llama(CONFIG).init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    return jax.tree.map(lambda x: x * jnp.exp(jnp.arange(x.shape[-1]) % 5).astype(x.dtype), made)


def decoded(codes, scale):
    codes = np.asarray(codes).astype(np.float64)
    if scale.shape[1] == 1 and codes.shape[1] != 128:
        return codes * scale
    return codes * np.repeat(np.repeat(np.asarray(scale, np.float64), 128, 0), 128, 1)


@pytest.mark.parametrize("format", FORMATS)
def test_codes_and_scales_are_those_of_numpy(format, params, tmp_path):
    report = pretrained.export(tmp_path / "out", CONFIG, params, format=format)
    found = {name: tensor.mapped() for name, tensor in tensors_of(tmp_path / "out").items()}
    suffix = "weight_scale_inv" if format == "deepseek-blocks" else "weight_scale"
    weight = np.asarray(params["layers"]["mlp"]["up"]["kernel"][1]).T  # (out, in)
    codes, scale = (found[f"model.layers.1.mlp.up_proj.{kind}"] for kind in ("weight", suffix))
    assert codes.dtype == ml_dtypes.float8_e4m3fn and scale.dtype == np.float32
    if format == "compressed-tensors-channel":
        amax = np.abs(weight).max(1, keepdims=True)
        whole = amax / np.float32(448)
    else:
        amax = np.abs(weight.reshape(3, 128, 2, 128)).max((1, 3))
        whole = np.repeat(np.repeat(amax / np.float32(448), 128, 0), 128, 1)
    np.testing.assert_allclose(scale, amax / 448, rtol=2e-7)
    own = np.clip(weight / whole, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert np.mean(own.view(np.uint8) != np.asarray(codes).view(np.uint8)) < 1e-3  # a quotient on a tie may round either way
    error = np.abs(decoded(codes, scale) - weight)
    assert (error <= np.maximum(2.0**-4 * np.abs(weight), 2.0**-10 * 1.01 * whole)).all()
    assert 0 < report.errors["mlp/up"] < 0.04
    quantized = sum(x.size for name, x in found.items() if x.dtype == ml_dtypes.float8_e4m3fn)
    assert quantized == 2 * sum(layer["kernel"][0].size for layer in [*attention(params), *mlp(params)])
    assert report.nbytes == sum(x.nbytes for x in found.values())
    others = {name: x.dtype for name, x in found.items() if x.dtype not in (ml_dtypes.float8_e4m3fn, np.float32)}
    assert set(others.values()) == {np.dtype(ml_dtypes.bfloat16)} and "model.embed_tokens.weight" in others
    document = json.loads((tmp_path / "out" / "config.json").read_text())
    assert document["quantization_config"]["quant_method"] == ("fp8" if "deepseek" in format else "compressed-tensors")


def attention(params):
    return [params["layers"]["attention"][name] for name in "qkvo"]


def mlp(params):
    return [params["layers"]["mlp"][name] for name in ("gate", "up", "down")]


def test_a_kernel_of_zeros_is_exported_as_zeros(params, tmp_path):
    zero = jax.tree.map(jnp.zeros_like, params)
    report = pretrained.export(tmp_path / "out", CONFIG, zero, format=FORMATS[0])
    codes = tensors_of(tmp_path / "out")["model.layers.0.self_attn.q_proj.weight"].mapped()
    assert not np.asarray(codes).view(np.uint8).any() and report.errors["attention/q"] == 0.0


def test_what_readers_would_read_wrongly_is_refused_and_nothing_is_written(params, tmp_path):
    odd = llama.preset("tiny", vocab_size=96, hidden=192, intermediate=384, layers=1, heads=2, kv_heads=1)
    weights = llama.Llama(odd).init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    for call, says in (
        (lambda out: pretrained.export(out, odd, weights, format="deepseek-blocks"), "no multiples of 128; use format="),
        (lambda out: pretrained.export(out, CONFIG, params, format="int4"), "format='int4' is unknown; use one of"),
        (lambda out: pretrained.export(out, CONFIG, weights, format=FORMATS[0]), "params"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            call(tmp_path / "refused")
        assert not (tmp_path / "refused").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds files; give a new folder"):
        pretrained.export(tmp_path / "full", CONFIG, params, format=FORMATS[0])
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


def test_an_export_is_no_model_to_train_on(params, tmp_path):
    pretrained.export(tmp_path / "out", CONFIG, params, format=FORMATS[0])
    with pytest.raises(ValueError, match="quantization_config"):
        pretrained.load(tmp_path / "out")
