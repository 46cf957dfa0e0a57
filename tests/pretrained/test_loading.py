"""Loading: every tensor in its place, in its dtype, on its devices; one parameter at a time; and every fault by its name."""

import gc
import json
import tracemalloc

import hf_folder
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import parameters, same_bits, shapes

from coat_jax import pretrained
from coat_jax.models import llama
from coat_jax.parallel import fsdp_specs
from coat_jax.pretrained.safetensors import StoredTensor

PLACES = {  # our names, and those of the files
    ("attention", "q"): "self_attn.q_proj",
    ("attention", "k"): "self_attn.k_proj",
    ("attention", "v"): "self_attn.v_proj",
    ("attention", "o"): "self_attn.o_proj",
    ("mlp", "gate"): "mlp.gate_proj",
    ("mlp", "up"): "mlp.up_proj",
    ("mlp", "down"): "mlp.down_proj",
    ("attention_norm",): "input_layernorm",
    ("mlp_norm",): "post_attention_layernorm",
}


@pytest.fixture(name="folder")
def folder_of_a_model(tmp_path):
    return hf_folder.write_folder(tmp_path / "model")


def test_every_tensor_is_in_its_place_and_keeps_its_dtype(folder):
    arrays = hf_folder.tensors()
    config, params = pretrained.load(folder)
    assert (config.param_dtype, config.dtype, config.qkv_bias, config.norm_eps) == (jnp.bfloat16, jnp.bfloat16, True, 1e-6)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda x: x.shape, shapes(config))
    want = {
        ("embed", "embedding"): arrays.pop("model.embed_tokens.weight"),
        ("norm", "scale"): arrays.pop("model.norm.weight"),
        ("head", "kernel"): arrays.pop("lm_head.weight").T,
    }
    for place, name in PLACES.items():
        for ours, theirs in (("kernel", "weight"), ("scale", "weight"), ("bias", "bias")):
            found = [arrays.get(f"model.layers.{i}.{name}.{theirs}") for i in range(3)]
            if found[0] is not None and (ours == "bias" or (ours == "scale") == (found[0].ndim == 1)):
                want["layers", *place, ours] = np.stack([x.T for x in found])
    leaves = {tuple(key.key for key in path): x for path, x in jax.tree.leaves_with_path(params)}
    assert leaves.keys() == want.keys()
    for path, x in want.items():
        assert leaves[path].dtype == x.dtype, path
        np.testing.assert_array_equal(leaves[path], x)


def test_several_files_hold_what_one_holds(folder, tmp_path):
    assert same_bits(pretrained.load(hf_folder.write_folder(tmp_path / "five", files=5))[1], pretrained.load(folder)[1])


def test_a_dtype_is_that_of_all_parameters_and_of_the_computation(folder):
    _, kept = pretrained.load(folder)
    for dtype in (jnp.float32, jnp.bfloat16, "bfloat16"):
        config, cast = pretrained.load(folder, dtype=dtype)
        assert config.param_dtype == config.dtype == jnp.dtype(dtype)
        assert same_bits(cast, jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), kept))
    with pytest.raises(ValueError, match="load: dtype=float16; use float32 or bfloat16"):
        pretrained.load(folder, dtype=jnp.float16)


def test_a_layer_of_a_wider_dtype_widens_its_parameter(tmp_path):
    arrays = hf_folder.tensors()
    name = "model.layers.1.mlp.up_proj.weight"
    arrays[name] = np.random.default_rng(1).normal(size=arrays[name].shape).astype(np.float32)
    _, params = pretrained.load(hf_folder.write_folder(tmp_path / "mixed", arrays))
    up = params["layers"]["mlp"]["up"]["kernel"]
    assert (up.dtype, params["layers"]["mlp"]["down"]["kernel"].dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(up[1], arrays[name].T)


def test_what_follows_from_the_rest_is_ignored(tmp_path):
    arrays = hf_folder.tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    config = hf_folder.CONFIG | {"tie_word_embeddings": True}
    found, params = pretrained.load(hf_folder.write_folder(tmp_path / "tied", arrays, config))
    assert found.tied_head and "head" not in params


def test_parameters_lie_where_they_are_asked_to(folder):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    _, want = pretrained.load(folder)

    def by_rule(tree):
        return jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), fsdp_specs(tree, 8, min_size=1))

    one, tree = jax.NamedSharding(mesh, jax.P()), by_rule(want)
    for given, places in ((one, jax.tree.map(lambda _: one, want)), (tree, tree), (by_rule, tree)):
        _, params = pretrained.load(folder, sharding=given)
        assert jax.tree.map(lambda x: x.sharding, params) == places
        assert same_bits(params, want)
    for given, words in (({"embed": one}, "is no tree like the parameters"), (jax.P(), "use a jax.sharding.Sharding")):
        with pytest.raises(ValueError, match=words):
            pretrained.load(folder, sharding=given)


def test_equal_parts_are_read_once(folder, monkeypatch):
    read = []
    original = StoredTensor.mapped
    monkeypatch.setattr(StoredTensor, "mapped", lambda tensor: read.append(tensor.name) or original(tensor))
    mesh = jax.make_mesh((8,), ("all",), axis_types=(jax.sharding.AxisType.Auto,))
    pretrained.load(folder, sharding=jax.NamedSharding(mesh, jax.P()))
    assert sorted(read) == sorted(hf_folder.tensors())


def test_the_host_holds_one_parameter_beside_what_is_placed(tmp_path):
    """What the host held at most, less what it holds in the end: on a CPU that is what was placed."""
    config = llama.Config(512, 256, 512, 8, 4, 4, param_dtype=jnp.float32)
    pretrained.save(tmp_path, config, parameters(config))
    mesh = jax.make_mesh((2,), ("two",), axis_types=(jax.sharding.AxisType.Auto,))
    leaves = [x.size * 4 for x in jax.tree.leaves(shapes(config))]
    gc.collect()
    tracemalloc.start()  # counts NumPy's arrays, and so what the host holds; JAX's own it does not see
    _, params = pretrained.load(tmp_path, sharding=jax.NamedSharding(mesh, jax.P()), dtype=jnp.bfloat16)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak - held <= max(leaves) / 2 + 2**20 < sum(leaves) / 4
    assert len(jax.tree.leaves(params)) == len(leaves)


FAULTS = {
    "a tensor is missing": ({"model.layers.2.mlp.up_proj.weight": None}, "'model.layers.2.mlp.up_proj.weight' is in none of"),
    "the head is missing": ({"lm_head.weight": None}, "'lm_head.weight' is in none of its files"),
    "a tensor too much": (
        {"model.layers.0.self_attn.o_proj.bias": np.zeros(16, np.float32)},
        "model.safetensors: 'model.layers.0.self_attn.o_proj.bias' is no part of the model",
    ),
    "a layer too much": ({"model.layers.3.mlp.up_proj.weight": np.zeros((12, 16), np.float32)}, "up_proj.weight' is no part"),
    "a kernel on its side": (
        {"model.layers.1.mlp.up_proj.weight": np.zeros((16, 12), np.float32)},
        r"model.safetensors: 'model.layers.1.mlp.up_proj.weight' has shape \(16, 12\); config.json makes it \(12, 16\)",
    ),
    "codes": ({"lm_head.weight": np.zeros((24, 16), np.int8)}, "'lm_head.weight' holds int8; weights of float32, bfloat16"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_tensors_that_do_not_fit_are_refused_by_file_and_name(tmp_path, case):
    changes, words = FAULTS[case]
    arrays = {name: x for name, x in (hf_folder.tensors() | changes).items() if x is not None}
    with pytest.raises(ValueError, match=words) as error:
        pretrained.load(hf_folder.write_folder(tmp_path / "model", arrays))
    assert str(tmp_path / "model") in str(error.value)


def test_folders_that_are_incomplete_are_refused_by_file(folder, tmp_path):
    weights, several = folder / "model.safetensors", hf_folder.write_folder(tmp_path / "three", files=3)
    shard, index = several / "model-00002-of-00003.safetensors", several / "model.safetensors.index.json"
    whole, text, weight_map = shard.read_bytes(), index.read_text(), json.loads(index.read_text())["weight_map"]
    shard.write_bytes(whole[:-1])
    with pytest.raises(
        ValueError, match=r"model-00002-of-00003.safetensors: 'model.*' ends at byte \d+ of a file of \d+: it is cut"
    ):
        pretrained.load(several)
    shard.unlink()
    with pytest.raises(
        ValueError, match="model-00002-of-00003.safetensors: there is no such file, and model.safetensors.index"
    ):
        pretrained.load(several)
    hf_folder.write_file(shard, {})
    with pytest.raises(ValueError, match="model-00002-of-00003.safetensors: 'model.* is not in it, where .*index.json has it"):
        pretrained.load(several)
    shard.write_bytes(whole)
    (several / "more.safetensors").write_bytes(whole)
    index.write_text(json.dumps({"weight_map": weight_map | {"more": "more.safetensors"}}))
    with pytest.raises(ValueError, match="is in model-00002-of-00003.safetensors too; one tensor, one file"):
        pretrained.load(several)
    for file in ("../model/model.safetensors", "/etc/passwd", "model.bin", "..", ""):
        index.write_text(json.dumps({"weight_map": weight_map | {"lm_head.weight": file}}))
        with pytest.raises(ValueError, match=r"weight_map has 'lm_head.weight' in .*; use a .safetensors file of that folder"):
            pretrained.load(several)
    index.write_text(json.dumps({"weight_map": [1]}))
    with pytest.raises(ValueError, match="index.json: weight_map is no map"):
        pretrained.load(several)
    index.write_text(text)
    (several / "model.safetensors").write_bytes(weights.read_bytes())
    with pytest.raises(ValueError, match="holds both model.safetensors and model.safetensors.index.json"):
        pretrained.load(several)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    weights.unlink()
    with pytest.raises(ValueError, match="holds neither model.safetensors nor model.safetensors.index.json"):
        pretrained.load(folder)


def test_a_configuration_of_other_sizes_is_found_out_before_anything_is_read(folder, monkeypatch):
    monkeypatch.setattr(np, "memmap", None)
    for changes, words in (
        ({"num_hidden_layers": 2**23}, "'model.layers.3.input_layernorm.weight' is in none"),
        ({"vocab_size": 2**23}, r"'model.embed_tokens.weight' has shape \(24, 16\); config.json makes it \(8388608, 16\)"),
        ({"head_dim": 2**20}, r"has shape \(16, 16\); config.json makes it \(4194304, 16\)"),
    ):
        (folder / "config.json").write_text(json.dumps(hf_folder.CONFIG | changes))
        with pytest.raises(ValueError, match=words):
            pretrained.load(folder)


def test_float16_is_kept_and_computed_with_in_bfloat16(tmp_path):
    arrays = {name: x.astype(np.float16) for name, x in hf_folder.tensors().items()}
    config, params = pretrained.load(
        hf_folder.write_folder(tmp_path / "half", arrays, hf_folder.CONFIG | {"torch_dtype": "float16"})
    )
    assert (config.param_dtype, config.dtype) == (jnp.float16, jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.float16)}
    tokens = jnp.zeros((1, 4), jnp.int32)
    assert bool(jnp.isfinite(llama.Llama(config).apply({"params": params}, tokens)).all())
