"""`export`: a model with its weights in FP8, in the formats that inference engines read."""

import dataclasses
import enum
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from coat_jax import results
from coat_jax.models import llama
from coat_jax.pretrained.config_file import NAME
from coat_jax.pretrained.folder import WEIGHTS
from coat_jax.pretrained.leaves import Leaf, leaves_of
from coat_jax.pretrained.loading import at
from coat_jax.pretrained.safetensors import content
from coat_jax.pretrained.saving import check_params, document_of
from coat_jax.quant import E4M3, PerBlock, PerGroup, QuantSpec, quantize

BLOCK = 128
"""Rows and columns of a weight that share a scale in the formats of blocks."""


class Format(enum.StrEnum):
    """How weights are stored. In all of them w = code * scale, codes are E4M3, and only the kernels of the layers have them."""

    CHANNEL = "compressed-tensors-channel"
    """A scale for each output; activations are quantized token by token where the model runs."""
    BLOCK = "compressed-tensors-block"
    """A scale for each 128 x 128 of a weight, and for each 128 of an activation where the model runs."""
    DEEPSEEK = "deepseek-blocks"
    """The same numbers under DeepSeek-V3's names."""

    @property
    def scale_name(self) -> str:
        """What the scale of "x.weight" is called, behind "x."."""
        return "weight_scale_inv" if self is Format.DEEPSEEK else "weight_scale"

    @property
    def blocked(self) -> bool:
        """Whether a scale belongs to a block."""
        return self is not Format.CHANNEL

    @property
    def config(self) -> dict[str, Any]:
        """What config.json says as `quantization_config`."""
        if self is Format.DEEPSEEK:
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK],
                "modules_to_not_convert": ["lm_head"],
            }
        common = {"num_bits": 8, "type": "float", "symmetric": True}
        weights: dict[str, Any] = {**common, "dynamic": False, "strategy": "channel"}
        inputs: dict[str, Any] = {**common, "dynamic": True, "strategy": "token"}
        if self.blocked:
            weights |= {"strategy": "block", "block_structure": [BLOCK, BLOCK]}
            inputs |= {"strategy": "group", "group_size": BLOCK}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """What an export wrote.

    Attributes:
      nbytes: of the file of weights.
      plain_nbytes: of the same tensors in bfloat16.
      errors: for each kind of kernel, such as "attention/q", the greatest |decoded - w| / |w| of a layer (Euclidean norms).
    """

    nbytes: int
    plain_nbytes: int
    errors: dict[str, float]

    def __str__(self) -> str:
        worst = (f"{kind.ljust(max(map(len, self.errors)))}  {error:.4f}" for kind, error in self.errors.items())
        sizes = f"{self.nbytes / 1e6:.1f} MB, {self.plain_nbytes / 1e6:.1f} MB in bfloat16"
        return "\n".join(["greatest error of a layer, of the norm of its weights:", *worst, sizes])


def export(
    folder: str | Path, config: llama.Config, params: Any, *, format: Format | str, like: str | Path | None = None
) -> ExportReport:
    """Writes config.json and model.safetensors with the kernels of all layers in E4M3: code = w / scale, scale = amax / 448.

    Embedding, head, norms and biases are written in bfloat16, scales in float32. config.json is written last.

    Args:
      folder: a new or an empty one.
      config, params: a model, as `load` gives it.
      format: a `Format` or its name.
      like: as in `save`.

    Returns:
      Sizes and errors.

    Raises:
      ValueError: an unknown format; a folder that holds something; a width that is no multiple of 128 in a format of blocks,
        which readers would pad in different ways; parameters that are not those of `config`.
      OSError: it cannot be written.

    Source: compressed-tensors, https://github.com/vllm-project/compressed-tensors; DeepSeek-V3, arXiv 2412.19437.
    """
    if format not in [*Format]:
        raise ValueError(f"export: format={str(format)!r} is unknown; use one of {', '.join(Format)}")
    form, folder = Format(format), Path(folder)
    results.check_folder("folder", folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"export: folder={str(folder)!r} holds files; give a new folder")
    leaves = leaves_of(config)
    check_params(params, leaves)
    for leaf in leaves:
        if form.blocked and _quantized(leaf) and any(n % BLOCK for n in leaf.row):
            name, shape = "/".join(leaf.path), "x".join(map(str, leaf.row))
            raise ValueError(f"export: {name} is {shape}, no multiples of {BLOCK}; use format={str(Format.CHANNEL)!r}")
    document = document_of(config, like) | {"torch_dtype": "bfloat16", "quantization_config": form.config}
    errors: dict[str, float] = {}
    tensors = [tensor for leaf in leaves for tensor in _tensors(leaf, params, form, errors)]
    folder.mkdir(parents=True, exist_ok=True)
    header = {t.name: (t.dtype, t.shape) for t in tensors}
    results.write(folder / WEIGHTS, iter(content(header, (t.value() for t in tensors))))
    results.write(folder / NAME, json.dumps(document, indent=2) + "\n")
    plain = sum(2 * int(np.prod(t.shape)) for t in tensors if not t.name.endswith(form.scale_name))
    return ExportReport(sum(t.nbytes for t in tensors), plain, errors)


@dataclasses.dataclass(frozen=True)
class _Tensor:
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    value: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


def _quantized(leaf: Leaf) -> bool:
    return leaf.layers is not None and leaf.path[-1] == "kernel"


def _tensors(leaf: Leaf, params: Any, form: Format, errors: dict[str, float]) -> Iterator[_Tensor]:
    """The tensors of a parameter, which are made when they are written: codes and then scales of a kernel."""

    def stored(layer: int | None) -> np.ndarray:
        x = at(params, leaf.path)
        return leaf.turned(np.asarray(x if layer is None else x[layer]))

    for layer, name in enumerate(leaf.names()):
        row = None if leaf.layers is None else layer
        shape = leaf.stored_shape
        if not _quantized(leaf):
            dtype = np.dtype(jnp.bfloat16)
            yield _Tensor(name, dtype, shape, functools.partial(_cast, functools.partial(stored, row), dtype))
            continue
        made: dict[str, np.ndarray] = {}

        def codes(row: int | None = row, made: dict[str, np.ndarray] = made) -> np.ndarray:
            payload, made["scale"], error = encoded(stored(row), form)
            kind = "/".join(leaf.path[1:-1])
            errors[kind] = max(errors.get(kind, 0.0), error)
            return payload

        yield _Tensor(name, np.dtype(E4M3.dtype), shape, codes)
        scales = tuple(n // BLOCK for n in shape) if form.blocked else (shape[0], 1)
        scale_name = f"{name.removesuffix('weight')}{form.scale_name}"
        yield _Tensor(scale_name, np.dtype(np.float32), scales, functools.partial(made.pop, "scale"))


def _cast(stored: Callable[[], np.ndarray], dtype: np.dtype) -> np.ndarray:
    return stored().astype(dtype)


def encoded(weight: np.ndarray, form: Format) -> tuple[np.ndarray, np.ndarray, float]:
    """Codes and float32 scales of a weight (out, in), and |decoded - w| / |w|."""
    granularity = PerBlock((BLOCK, BLOCK)) if form.blocked else PerGroup(weight.shape[1])
    array = quantize(jnp.asarray(weight, jnp.float32), QuantSpec(E4M3, granularity), implementation="xla")
    payload, scale = np.asarray(array.payload), np.asarray(array.scale)
    whole = np.repeat(np.repeat(scale, BLOCK, 0), BLOCK, 1) if form.blocked else scale
    exact = np.asarray(weight, np.float32)
    norm = float(np.linalg.norm(exact))
    error = float(np.linalg.norm(payload.astype(np.float32) * whole - exact))
    return payload, scale, error / norm if norm else 0.0
