"""Pretrained models in and out: folders of config.json and safetensors files, as Hugging Face's transformers write them.

    config, params = coat_jax.pretrained.load("SmolLM2-135M")
    coat_jax.pretrained.save("fine-tuned", config, params)

Llama, Mistral, Qwen2 and Qwen3. Nothing is unpickled, downloaded or run: files hold names, sizes and numbers.
"""

from coat_jax.pretrained.config_file import read_config
from coat_jax.pretrained.exporting import export
from coat_jax.pretrained.loading import load
from coat_jax.pretrained.saving import save

__all__ = ["export", "load", "read_config", "save"]
