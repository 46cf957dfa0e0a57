"""Saving: what is loaded comes back bit for bit, whole or not at all, and no other model is overwritten."""

import dataclasses
import json

import hf_folder
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from small_models import CONFIGS, parameters, same_bits

from coat_jax import pretrained

LLAMA = CONFIGS["llama"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_saved_is_loaded_bit_for_bit(name, tmp_path):
    for dtype in (np.float32, ml_dtypes.bfloat16, np.float16):
        config = dataclasses.replace(CONFIGS[name], param_dtype=jnp.dtype(dtype), dtype=jnp.dtype(dtype))
        params = parameters(config, dtype)
        folder = tmp_path / np.dtype(dtype).name
        pretrained.save(folder, config, params)
        assert names(folder) == ["config.json", "model.safetensors"]
        found, loaded = pretrained.load(folder)
        assert found == dataclasses.replace(config, dtype=found.dtype)
        assert same_bits(loaded, params)


@pytest.mark.parametrize("files", [1, 4])
def test_every_tensor_of_a_folder_of_others_comes_back(files, tmp_path):
    """Matrices in bfloat16, norms and biases in float32: names, dtypes, shapes and bytes."""
    config, params = pretrained.load(hf_folder.write_folder(tmp_path / "theirs", files=files))
    pretrained.save(tmp_path / "ours", config, params, like=tmp_path / "theirs")
    got, want = hf_folder.read_file(tmp_path / "ours" / "model.safetensors"), hf_folder.tensors()
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert (got[name].dtype, got[name].shape, got[name].tobytes()) == (x.dtype, x.shape, x.tobytes()), name
    assert json.loads((tmp_path / "ours" / "config.json").read_text()) == hf_folder.CONFIG


def test_large_models_are_cut_into_files_that_an_index_names(tmp_path):
    params = parameters(LLAMA)
    pretrained.save(tmp_path, LLAMA, params, file_bytes=6000)
    files = names(tmp_path)[1:-1]
    assert len(files) > 3
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    held = {name: file for file in files for name in hf_folder.read_file(tmp_path / file)}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(params))
    assert all(sum(x.nbytes for x in hf_folder.read_file(tmp_path / file).values()) <= 6000 for file in files)
    assert same_bits(pretrained.load(tmp_path)[1], params)


@pytest.mark.parametrize("file_bytes", [10**9, 6000])
def test_weights_are_replaced_whole_or_not_at_all(tmp_path, file_bytes):
    old = parameters(LLAMA)
    new, newer = (jax.tree.map(lambda x, k=k: x + k, old) for k in (1, 2))
    pretrained.save(tmp_path, LLAMA, old, file_bytes=file_bytes)
    (tmp_path / "tokenizer.json").write_text("{}")
    count = len(names(tmp_path))

    class Lost:
        """A parameter whose device is gone."""

        shape, dtype = old["layers"]["mlp"]["down"]["kernel"].shape, old["layers"]["mlp"]["down"]["kernel"].dtype

        def __getitem__(self, layer):
            if layer == 2:
                raise RuntimeError("gone")
            return old["layers"]["mlp"]["down"]["kernel"][layer]

    layers = new["layers"] | {"mlp": new["layers"]["mlp"] | {"down": {"kernel": Lost()}}}
    with pytest.raises(RuntimeError, match="gone"):
        pretrained.save(tmp_path, LLAMA, new | {"layers": layers}, file_bytes=file_bytes)
    assert same_bits(pretrained.load(tmp_path)[1], old)
    assert len(names(tmp_path)) == count
    for params in (new, newer):
        pretrained.save(tmp_path, LLAMA, params, file_bytes=file_bytes)
        assert same_bits(pretrained.load(tmp_path)[1], params)
        assert len(names(tmp_path)) == count  # nothing is left of what was before
    assert "tokenizer.json" in names(tmp_path)


def test_no_other_model_is_overwritten(tmp_path):
    params = parameters(LLAMA)
    pretrained.save(tmp_path / "a", LLAMA, params)
    before = {name: (tmp_path / "a" / name).read_bytes() for name in names(tmp_path / "a")}
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    cases = [
        (dataclasses.replace(LLAMA, param_dtype=jnp.bfloat16), half, {}, "holds another model, config.json differs"),
        (dataclasses.replace(LLAMA, norm_eps=1e-6), params, {}, "holds another model, config.json differs from config; give"),
        (CONFIGS["qwen3"], parameters(CONFIGS["qwen3"]), {}, "holds another model"),
        (LLAMA, params, {"file_bytes": 6000}, "holds this model in one file, and these are more than file_bytes"),
    ]
    for config, given, options, words in cases:
        with pytest.raises(ValueError, match=words):
            pretrained.save(tmp_path / "a", config, given, **options)
    assert {name: (tmp_path / "a" / name).read_bytes() for name in names(tmp_path / "a")} == before
    pretrained.save(tmp_path / "b", LLAMA, params, file_bytes=6000)
    with pytest.raises(ValueError, match="holds this model in several files, and these fit into one"):
        pretrained.save(tmp_path / "b", LLAMA, params)
    for name, text in (("c/config.json", '{"model_type": "gemma"}'), ("d/pytorch_model.bin", ""), ("e/x.safetensors", "")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match="holds another model|without config.json; give another folder"):
            pretrained.save((tmp_path / name).parent, LLAMA, params)
    (tmp_path / "f").write_text("")
    with pytest.raises(ValueError, match="f' is a file; name a folder"):
        pretrained.save(tmp_path / "f", LLAMA, params)


def test_the_configuration_of_the_model_it_comes_from_is_taken_over(tmp_path):
    theirs = hf_folder.write_folder(tmp_path / "theirs")
    config, params = pretrained.load(theirs, dtype=jnp.float32)
    pretrained.save(tmp_path / "ours", config, params, like=theirs)
    document = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert document == hf_folder.CONFIG | {"torch_dtype": "float32"}
    assert pretrained.read_config(tmp_path / "ours") == config
    with pytest.raises(ValueError, match="theirs' has vocab_size=24, config has 32; give the folder that it comes from"):
        pretrained.save(tmp_path / "more", CONFIGS["qwen2"], parameters(CONFIGS["qwen2"]), like=theirs)


def test_parameters_that_are_not_the_configurations_are_refused_by_name(tmp_path):
    params = parameters(LLAMA)
    cases = [
        ({k: v for k, v in params.items() if k != "norm"}, "params lack 'norm/scale', and config says otherwise"),
        (params | {"bias": jnp.ones(3)}, "params hold 'bias', and config says otherwise"),
        (params | {"norm": {"scale": jnp.ones(3)}}, r"params have 'norm/scale' of shape \(3,\); config makes it \(16,\)"),
        (params | {"norm": {"scale": jnp.ones(16, jnp.int32)}}, "'norm/scale' of dtype int32; use float32, bfloat16"),
        (params | {"norm": {"scale": jnp.ones(16, jnp.float8_e4m3fn)}}, "'norm/scale' of dtype float8_e4m3fn; use float32"),
    ]
    for given, words in cases:
        with pytest.raises(ValueError, match=words):
            pretrained.save(tmp_path / "a", LLAMA, given)
    assert not (tmp_path / "a").exists()


def test_sharded_parameters_are_saved_as_whole_ones(tmp_path):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    params = parameters(LLAMA)
    pretrained.save(tmp_path / "whole", LLAMA, params)

    def cut(x):
        return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*[None] * (x.ndim - 1), "fsdp")))

    pretrained.save(tmp_path / "cut", LLAMA, jax.tree.map(cut, params))
    whole, sharded = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert whole == sharded
