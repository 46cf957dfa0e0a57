"""config.json of a pretrained model and `llama.Config`: what is read, what is ignored, and what is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from coat_jax.models import llama
from coat_jax.ops import Llama3Scaling
from coat_jax.pretrained.json_file import read_object

NAME = "config.json"
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Known architectures by their `model_type`."""
PARAM_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
"""Dtypes of stored weights by their names in the file."""
MOST = 2**24
"""No size of a model reaches this; numbers beyond it are a damaged file's."""

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
}
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "attention_dropout": (0,),
    "use_sliding_window": (False,),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "is_decoder": (False, True),
}
"""Keys of the mathematics that have one value here, which absence means too."""
_IGNORED = {
    *("architectures", "model_type", "torch_dtype", "dtype", "rope_theta", "rope_scaling", "rope_parameters", "rms_norm_eps"),
    *("num_key_value_heads", "head_dim", "attention_bias", "tie_word_embeddings", "sliding_window", "layer_types"),
    *("max_position_embeddings", "max_window_layers", "initializer_range", "use_cache", "pretraining_tp", "auto_map"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "transformers_version", "is_llama_config"),
    *(
        "transformers.js_config",
        "id2label",
        "label2id",
        "problem_type",
        "return_dict",
        "output_attentions",
        "task_specific_params",
    ),
    *("output_hidden_states", "chunk_size_feed_forward", "temperature", "top_p", "top_k", "do_sample", "max_length"),
    *("unsloth_version", "unsloth_fixed", "tokenizer_class", "finetuning_task"),
}
"""Keys that are read apart, or that do not touch the logits of a given sequence."""
_ROPE_KEYS = {"rope_type", "type", "rope_theta", *(field.name for field in dataclasses.fields(Llama3Scaling))}


def read_config(folder: str | Path) -> llama.Config:
    """The configuration that a folder's config.json describes; `param_dtype` and `dtype` are the dtype it names.

    Weights of float16 are computed with in bfloat16, as the library computes in that or in float32.

    Args:
      folder: of a Llama, Mistral, Qwen2 or Qwen3.

    Raises:
      ValueError: no config.json or none that can be read; another architecture; a key that changes the mathematics, such as a
        sliding window, another activation or rotation; a key that is unknown and not null or false; sizes that do not fit.
    """
    path = Path(folder) / NAME
    return parse_config(read_object(path), str(path))


def parse_config(document: dict[str, Any], where: str) -> llama.Config:
    """`read_config` of a document that has been read; `where` is its file, for messages."""
    reader = _Reader(document, where)
    kind = reader.kind()
    reader.refuse_others()
    heads = reader.size("num_attention_heads")
    kv_heads = reader.size("num_key_value_heads", heads if kind == "llama" else None)
    # A file without head_dim means hidden / heads to all but Qwen3, whose class says 128.
    head_dim = document.get("head_dim")
    if kind == "qwen3" or head_dim is not None:
        head_dim = reader.size("head_dim")
    bias = reader.flag("attention_bias") if kind in ("llama", "qwen3") else False
    theta, scaling = reader.rotation()
    param_dtype = reader.dtype()
    sizes: dict[str, Any] = {field: reader.size(key) for field, key in _SIZES.items()}
    try:
        return llama.Config(
            **sizes,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=reader.number("rms_norm_eps", 1e-6),
            tied_head=reader.flag("tie_word_embeddings"),
            qkv_bias=bias or kind == "qwen2",
            o_bias=bias,
            qk_norm=kind == "qwen3",
            param_dtype=param_dtype,
            dtype=jnp.bfloat16 if param_dtype == jnp.float16 else param_dtype,
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Values of a document by key, each checked; messages name the file and the key."""

    document: dict[str, Any]
    where: str

    def refused(self, key: str, why: str) -> ValueError:
        """The error for the value of a key."""
        return ValueError(f"{self.where}: {repr(key[:100])[1:-1]}={str(self.document.get(key))[:100]!r} {why}")

    def kind(self) -> str:
        """The `model_type`, which has to be known and to agree with the architecture."""
        kind, classes = self.document.get("model_type"), self.document.get("architectures")
        if not isinstance(kind, str) or kind not in ARCHITECTURES:
            raise self.refused("model_type", f"is not read; known are {', '.join(ARCHITECTURES)}")
        if classes not in (None, [ARCHITECTURES[kind]]):
            raise self.refused("architectures", f"is not read; model_type {kind!r} needs ['{ARCHITECTURES[kind]}']")
        return kind

    def refuse_others(self) -> None:
        """Refuses what changes the mathematics, and what is unknown and switched on."""
        for key, allowed in _FIXED.items():
            if self.document.get(key) is not None and self.document[key] not in allowed:
                raise self.refused(key, f"changes the model; only {allowed[0]!r} is computed here")
        kind = self.document["model_type"]
        # Qwen's window counts only where use_sliding_window is set; Mistral's always, and its class says 4096 where nothing is.
        window = self.document.get("sliding_window", 4096 if kind == "mistral" else None)
        if kind == "mistral" and window is not None:
            raise self.refused("sliding_window", "is a sliding window (absent is one of 4096); only null is computed here")
        layers = self.document.get("layer_types")
        if layers is not None and (not isinstance(layers, list) or any(layer != "full_attention" for layer in layers)):
            raise self.refused("layer_types", "holds other layers than 'full_attention', which are not computed here")
        known = {*_IGNORED, *_FIXED, *_SIZES.values()}
        for key, value in self.document.items():
            if key not in known and value is not None and value is not False and not key.startswith("_"):
                raise self.refused(key, "is unknown and may change the model; take it out if it does not")

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 to `MOST`."""
        value = self.document.get(key)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value < MOST:
            raise self.refused(key, f"is no size; use a whole number from 1 to {MOST}")
        return value

    def flag(self, key: str) -> bool:
        """True or false; absent is false."""
        value = self.document.get(key)
        if value not in (None, False, True) or isinstance(value, int) and not isinstance(value, bool):
            raise self.refused(key, "is neither true nor false")
        return bool(value)

    def number(self, key: str, default: float, of: dict[str, Any] | None = None) -> float:
        """A positive number of the document, or of an object in it."""
        value = (self.document if of is None else of).get(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise ValueError(f"{self.where}: {key}={str(value)[:100]!r} is no positive number")
        return float(value)

    def dtype(self) -> Any:
        """The dtype of the weights, under its new name or its old one; absent is float32, as to PyTorch."""
        key = "dtype" if self.document.get("dtype") is not None else "torch_dtype"
        name = self.document.get(key) or "float32"
        if not isinstance(name, str) or name not in PARAM_DTYPES:
            raise self.refused(key, f"is not read; known are {', '.join(PARAM_DTYPES)}")
        return PARAM_DTYPES[name]

    def rotation(self) -> tuple[float, Llama3Scaling | None]:
        """Base and scaling of the rotary frequencies, in the spelling of transformers 5 or in the older one."""
        new, old = self.document.get("rope_parameters"), self.document.get("rope_scaling")
        if new is not None and old is not None and new != old:
            raise self.refused("rope_parameters", "and rope_scaling are both there and differ; take one out")
        key = "rope_scaling" if new is None else "rope_parameters"
        rope = self.document.get(key)
        rope = {} if rope is None else rope
        if not isinstance(rope, dict) or not set(rope) <= _ROPE_KEYS:
            raise self.refused(key, f"is not read; its keys are {', '.join(sorted(_ROPE_KEYS))}")
        theta = self.number("rope_theta", 10_000.0)
        inner = self.number("rope_theta", theta, rope)
        if "rope_theta" in self.document and inner != theta:
            raise self.refused("rope_theta", f"and that of {key}, {inner}, differ; take one out")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if rope.get("type", kind) != kind or kind not in ("default", "llama3"):
            raise self.refused(key, "is another rotation than 'default' or 'llama3', the ones computed here")
        if kind == "default":
            return inner, None
        factors = {name: self.number(name, 0, rope) for name in ("factor", "low_freq_factor", "high_freq_factor")}
        context = rope.get("original_max_position_embeddings")
        if type(context) is not int:
            raise self.refused(key, "has no original_max_position_embeddings, a whole number")
        try:
            return inner, Llama3Scaling(**factors, original_max_position_embeddings=context)
        except ValueError as error:
            raise ValueError(f"{self.where}: {key}: {error}") from None


def config_document(config: llama.Config) -> dict[str, Any]:
    """What config.json says of a configuration, in the spelling that every version of transformers reads.

    A model without biases and norms of heads is a Llama, with biases of q, k and v a Qwen2, with norms a Qwen3.

    Raises:
      ValueError: a model that none of these is: LayerNorm, attention to later tokens, other biases; or parameters of another
        dtype than float32, bfloat16 or float16.
    """
    c = config
    for field, value, only in (("norm", str(c.norm), "rms"), ("causal", c.causal, True)):
        if value != only:
            raise ValueError(f"config: {field}={value!r} is of no architecture in {', '.join(ARCHITECTURES)}; use {only!r}")
    kind = "qwen3" if c.qk_norm else "qwen2" if c.qkv_bias and not c.o_bias else "llama"
    if c.o_bias != c.qkv_bias and kind != "qwen2":
        raise ValueError(f"config: qkv_bias={c.qkv_bias} with o_bias={c.o_bias} is of no architecture; use both or none")
    names = [name for name, dtype in PARAM_DTYPES.items() if jnp.dtype(dtype) == jnp.dtype(c.param_dtype)]
    if not names:
        raise ValueError(f"config: param_dtype={jnp.dtype(c.param_dtype)} is not stored; use one of {', '.join(PARAM_DTYPES)}")
    document: dict[str, Any] = {"architectures": [ARCHITECTURES[kind]], "model_type": kind, "torch_dtype": names[0]}
    document |= {key: getattr(c, field) for field, key in _SIZES.items()}
    document |= {"num_key_value_heads": c.kv_heads, "hidden_act": "silu"}
    document |= {"head_dim": c.head_width} if kind == "qwen3" or c.head_dim is not None else {}
    document |= {"rms_norm_eps": c.norm_eps, "tie_word_embeddings": c.tied_head, "rope_theta": c.rope_theta}
    scaling = None if c.rope_scaling is None else {"rope_type": "llama3", **dataclasses.asdict(c.rope_scaling)}
    document |= {"rope_scaling": scaling}
    if kind != "qwen2":
        document |= {"attention_bias": c.o_bias}
    return document
