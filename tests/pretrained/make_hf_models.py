"""Small random models written by transformers, with the logits it computes. Run in an environment with torch and transformers.

python make_hf_models.py make FOLDER      writes FOLDER/NAME for every name in MODELS, with tokens.npy and logits.npy
python make_hf_models.py logits FOLDER    writes FOLDER/logits.npy: what transformers computes of model and tokens.npy there;
                                          quantized weights are decoded to float32
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
MODELS = {
    # name: (configuration, options, bytes of a file)
    "llama": ("Llama", {"rms_norm_eps": 1e-5, "rope_parameters": PLAIN}, "5GB"),
    "llama_tied_sharded_scaled": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}, "50KB"),
    "llama_biased": ("Llama", {"attention_bias": True, "head_dim": 32, "rope_parameters": PLAIN}, "5GB"),
    "mistral": ("Mistral", {"sliding_window": None, "rope_parameters": PLAIN | {"rope_theta": 1e6}}, "60KB"),
    "qwen2": ("Qwen2", {"rope_parameters": PLAIN | {"rope_theta": 1e6}}, "5GB"),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": PLAIN}, "50KB"),
    "qwen3": ("Qwen3", {"head_dim": 32, "rope_parameters": PLAIN}, "60KB"),
    "qwen3_tied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True, "rope_parameters": PLAIN}, "5GB"),
}
LENGTH = 96  # three times the original context of LLAMA3


def make(folder: pathlib.Path) -> None:
    """Every model, its weights random numbers, so that a bias or a norm left out would show."""
    generator = torch.Generator().manual_seed(0)
    for name, (kind, options, file_bytes) in MODELS.items():
        config = getattr(transformers, f"{kind}Config")(**SIZES | options)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                wide = parameter.ndim == 2
                parameter.copy_(noise / parameter.shape[1] ** 0.5 if wide else (parameter != 0) + 0.3 * noise)
        model.save_pretrained(folder / name, max_shard_size=file_bytes)
        np.save(folder / name / "tokens.npy", np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, LENGTH)))
        logits(folder / name)


def logits(folder: pathlib.Path) -> None:
    """What transformers computes in float32 of the model in a folder."""
    quantized = json.loads((folder / "config.json").read_text()).get("quantization_config", {})
    kinds = {"compressed-tensors": "CompressedTensorsConfig", "fp8": "FineGrainedFP8Config"}
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    if quantized:
        options["quantization_config"] = getattr(transformers, kinds[quantized["quant_method"]])(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    with torch.no_grad():
        found = model(torch.from_numpy(np.load(folder / "tokens.npy"))).logits
    np.save(folder / "logits.npy", found.numpy())


if __name__ == "__main__":
    {"make": make, "logits": logits}[sys.argv[1]](pathlib.Path(sys.argv[2]))
