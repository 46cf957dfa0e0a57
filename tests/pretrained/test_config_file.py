"""config.json: both spellings, what is absent, and every key that would change the mathematics."""

import dataclasses
import json

import jax.numpy as jnp
import pytest
from small_models import CONFIGS

from coat_jax import ops
from coat_jax.models import llama
from coat_jax.pretrained.config_file import config_document, parse_config, read_config

LLAMA_31 = {  # as transformers 4 wrote it
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "mlp_bias": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128_000,
    "eos_token_id": [128_001, 128_008],
    "initializer_range": 0.02,
    "max_position_embeddings": 131_072,
    "pretraining_tp": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
    "use_cache": True,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
QWEN = LLAMA_31 | {"rope_scaling": None, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "attention_bias": None}
QWEN |= {"use_sliding_window": False, "sliding_window": 131_072, "max_window_layers": 28}
MISTRAL = LLAMA_31 | {"rope_scaling": None, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}


def parse(document, **changes):
    document = document | changes
    return parse_config({key: value for key, value in document.items() if value != "absent"}, "config.json")


def test_the_old_spelling_is_the_preset():
    preset = llama.preset("llama3.1-8b", param_dtype=jnp.bfloat16)
    assert parse(LLAMA_31) == preset
    scaling = {key: value for key, value in LLAMA_31["rope_scaling"].items() if key != "rope_type"} | {"type": "llama3"}
    assert parse(LLAMA_31, rope_scaling=scaling) == preset


def test_the_new_spelling_says_the_same():
    rope = LLAMA_31["rope_scaling"] | {"rope_theta": 500_000.0}
    new = {"rope_parameters": rope, "rope_scaling": "absent", "rope_theta": "absent", "torch_dtype": "absent"}
    assert parse(LLAMA_31, **new, dtype="bfloat16") == parse(LLAMA_31)
    plain = {"rope_type": "default", "rope_theta": 1e6}
    got = parse(LLAMA_31, **new | {"rope_parameters": plain}, dtype="bfloat16")
    assert (got.rope_theta, got.rope_scaling) == (1e6, None)


def test_absent_keys_mean_what_they_mean_to_transformers():
    names = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "rope_scaling", "torch_dtype", "tie_word_embeddings")
    got = parse(LLAMA_31, **dict.fromkeys((*names, "hidden_act", "architectures"), "absent"))
    assert (got.kv_heads, got.norm_eps, got.rope_theta, got.head_width) == (32, 1e-6, 10_000.0, 128)
    assert (got.param_dtype, got.tied_head, got.rope_scaling) == (jnp.float32, False, None)
    with pytest.raises(ValueError, match="num_key_value_heads='None' is no size"):
        parse(QWEN, num_key_value_heads="absent")  # to Qwen2 it means 32, whatever the heads
    with pytest.raises(ValueError, match="head_dim='None' is no size"):
        parse(QWEN, model_type="qwen3", architectures=["Qwen3ForCausalLM"])  # to Qwen3 it means 128
    assert parse(QWEN).qkv_bias and not parse(QWEN).o_bias  # no key says it
    assert parse(LLAMA_31, torch_dtype="float16").dtype == jnp.bfloat16


REFUSED = {
    "another model": ({"model_type": "gemma"}, "model_type='gemma' is not read; known are llama, mistral"),
    "another head": ({"architectures": ["LlamaForTokenClassification"]}, r"architectures=.* needs \['LlamaForCausalLM'\]"),
    "an activation": ({"hidden_act": "gelu"}, "hidden_act='gelu' changes the model; only 'silu' is computed here"),
    "a bias of the MLP": ({"mlp_bias": True}, "mlp_bias='True' changes the model"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout='0.1' changes the model"),
    "codes": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.* is unknown and may change the model"),
    "a key of tomorrow": ({"softcap": 30.0}, "softcap='30.0' is unknown and may change the model; take it out"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling=.* is another rotation than 'default'"),
    "sections": ({"rope_scaling": {"type": "default", "mrope_section": [1]}}, "rope_scaling=.* is not read; its keys are"),
    "a scaling by halves": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor='0' is no positive"),
    "no context": ({"rope_scaling": LLAMA_31["rope_scaling"] | {"original_max_position_embeddings": None}}, "a whole number"),
    "a scaling in reverse": (
        {"rope_scaling": LLAMA_31["rope_scaling"] | {"low_freq_factor": 5.0}},
        "rope_scaling: Llama3Scaling: low_freq_factor=5.0, high_freq_factor=4.0",
    ),
    "a rotation that is none": ({"rope_scaling": [1]}, "rope_scaling=.* is not read"),
    "two rotations": ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters=.* and rope_scaling are both there"),
    "two bases": (
        {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "rope_theta='500000.0' and that of rope_parameters, 10000.0, differ",
    ),
    "layers of windows": ({"layer_types": ["sliding_attention"]}, "layer_types=.* holds other layers"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers='0' is no size"),
    "half a layer": ({"num_hidden_layers": 1.5}, "num_hidden_layers='1.5' is no size"),
    "a layer that is true": ({"num_hidden_layers": True}, "num_hidden_layers='True' is no size"),
    "layers without end": ({"num_hidden_layers": 10**30}, "num_hidden_layers='10+' is no size"),
    "no width": ({"hidden_size": "absent"}, "hidden_size='None' is no size"),
    "heads that do not fit": ({"num_key_value_heads": 5}, "heads=32 is not a multiple of kv_heads=5"),
    "an epsilon that is none": ({"rms_norm_eps": float("nan")}, "rms_norm_eps='nan' is no positive number"),
    "a flag that is a word": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' is neither true nor false"),
    "another dtype": ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype='float8_e4m3fn' is not read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_changes_the_mathematics_is_refused_by_file_and_key(case):
    changes, words = REFUSED[case]
    with pytest.raises(ValueError, match=f"^config.json: .*{words}") as error:
        parse(LLAMA_31, **changes)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_sliding_windows_are_refused_where_they_count():
    assert parse(QWEN).layers == 32  # 131,072 counts only with use_sliding_window
    with pytest.raises(ValueError, match="use_sliding_window='True' changes the model"):
        parse(QWEN, use_sliding_window=True)
    assert parse(MISTRAL, sliding_window=None) == dataclasses.replace(parse(LLAMA_31), rope_scaling=None)
    for window in (4096, "absent"):
        with pytest.raises(ValueError, match="sliding_window=.* is a sliding window"):
            parse(MISTRAL, sliding_window=window)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_is_read(name, tmp_path):
    config = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config_document(config)))
    assert read_config(tmp_path) == config


def test_models_of_no_architecture_are_not_written():
    llama_config = CONFIGS["llama"]
    for changes, words in (
        ({"norm": "layer"}, "norm='layer' is of no architecture"),
        ({"causal": False}, "causal=False is of no architecture"),
        ({"o_bias": True}, "qkv_bias=False with o_bias=True is of no architecture"),
        ({"qk_norm": True, "qkv_bias": True}, "qkv_bias=True with o_bias=False is of no architecture"),
        ({"param_dtype": jnp.float8_e4m3fn}, "param_dtype=float8_e4m3fn is not stored"),
    ):
        with pytest.raises(ValueError, match=words):
            config_document(dataclasses.replace(llama_config, **changes))
    scaled = config_document(CONFIGS["llama, tied, scaled"])
    assert ops.Llama3Scaling(**{k: v for k, v in scaled["rope_scaling"].items() if k != "rope_type"})


def test_files_that_are_no_configuration_are_refused(tmp_path):
    with pytest.raises(ValueError, match="config.json: there is no such file"):
        read_config(tmp_path)
    for text, words in (
        ("[]", "list in place of a JSON object"),
        ("{", "it has to be JSON"),
        ('{"a":1,"a":2}', "'a' is there twice"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b" " * (2**24 + 1))
    with pytest.raises(ValueError, match="is longer than 16777216 bytes"):
        read_config(tmp_path)
