"""Folders as Hugging Face lays them out, written with NumPy alone and with nothing of ours."""

import json

import ml_dtypes
import numpy as np

NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "I8"}
DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "torch_dtype": "bfloat16",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 512,
    "eos_token_id": 7,
}


def tensors(layers=3, hidden=16, inner=12, vocab=24, q=16, kv=8):
    """The tensors of a Qwen2 of these sizes by name: matrices in bfloat16, norms and biases in float32."""
    rng, made = np.random.default_rng(0), {}
    shapes = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden), "model.norm": (hidden,)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {at + f"self_attn.{n}_proj": (rows, hidden) for n, rows in (("q", q), ("k", kv), ("v", kv))}
        shapes |= {at + "self_attn.o_proj": (hidden, q), at + "mlp.down_proj": (hidden, inner)}
        shapes |= {at + f"mlp.{n}_proj": (inner, hidden) for n in ("gate", "up")}
        shapes |= {at + f"{n}_layernorm": (hidden,) for n in ("input", "post_attention")}
        made |= {
            at + f"self_attn.{n}_proj.bias": rng.normal(size=r).astype(np.float32) for n, r in (("q", q), ("k", kv), ("v", kv))
        }
    for name, shape in shapes.items():
        made[name + ".weight"] = rng.normal(size=shape).astype(np.float32 if len(shape) == 1 else ml_dtypes.bfloat16)
    return made


def write_file(path, arrays):
    """A safetensors file."""
    header, end = {}, 0
    for name, x in arrays.items():
        header[name] = {"dtype": NAMES[str(x.dtype)], "shape": list(x.shape), "data_offsets": [end, end + x.nbytes]}
        end += x.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(x.tobytes() for x in arrays.values()))


def read_file(path):
    """The arrays of a safetensors file by name."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    spans = {name: (entry, slice(*(start + offset for offset in entry["data_offsets"]))) for name, entry in header.items()}
    return {name: np.frombuffer(raw[at], DTYPES[e["dtype"]]).reshape(e["shape"]) for name, (e, at) in spans.items()}


def write_folder(folder, arrays=None, config=CONFIG, files=1):
    """config.json and the arrays, in one file or in several with an index."""
    arrays = tensors() if arrays is None else arrays
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        write_file(folder / "model.safetensors", arrays)
        return folder
    weight_map = {name: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, name in enumerate(arrays)}
    for file in set(weight_map.values()):
        write_file(folder / file, {name: x for name, x in arrays.items() if weight_map[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
