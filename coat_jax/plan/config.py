"""`PlanConfig`: one training step to be planned, as a value."""

import dataclasses
import enum
import functools
from typing import Any

import jax.numpy as jnp

from coat_jax import recipes
from coat_jax.compiled import devices
from coat_jax.models import llama
from coat_jax.models.plain import Remat
from coat_jax.optim import Master, codecs


class Baseline(enum.StrEnum):
    """What stands in for a recipe or a codec in the rows that ours are compared with."""

    PLAIN = "plain"
    """In place of a recipe: plain Flax in BF16, without an operation of this library."""
    OPTAX = "optax"
    """In place of a codec: `optax.adamw`, moments in the dtype of the parameters."""


MOST_TOKENS = 2**28
"""Tokens of a step that a plan covers: XLA counts elements of an array's axis in 32 bits."""


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """A training step of a Llama with bf16 parameters and gradients, on GPUs of one kind.

    Attributes:
      model: a preset of `coat_jax.models.llama`.
      recipe: a name of `coat_jax.recipes`, or "plain" for plain Flax.
      codec: a name of `coat_jax.codecs`, or "optax" for `optax.adamw`.
      master: how bf16 parameters keep small updates: a `coat_jax.optim.Master`, or None.
      remat: "none"; "layer": each layer is computed again from its input; "dots" (plain only): all but weight products.
      fused: each layer is updated inside the backward pass.
      batch: sequences of one step, over all GPUs.
      seq: tokens of a sequence.
      gpus: how many GPUs share the step, fully sharded (FSDP).
      device: "h100", "h200", or the path of a description.

    Raises:
      ValueError: a name that is unknown, a count below 1, a batch that the GPUs do not divide, or a combination that has no
        meaning.
    """

    model: str
    recipe: str = "lean"
    codec: str = "coat"
    master: str | None = None
    remat: str = "none"
    fused: bool = False
    batch: int = 1
    seq: int = 2048
    gpus: int = 1
    device: str = "h100"

    def __post_init__(self):
        llama.preset(self.model)
        _ = self.gpu
        if self.recipe != Baseline.PLAIN and self.recipe not in recipes.NAMES:
            raise ValueError(f"recipe={self.recipe!r} is unknown; use one of {', '.join([*recipes.NAMES, Baseline.PLAIN])}")
        if self.codec != Baseline.OPTAX and self.codec not in codecs.names():
            raise ValueError(f"codec={self.codec!r} is unknown; use one of {', '.join([*codecs.names(), Baseline.OPTAX])}")
        if self.remat not in list(Remat):
            raise ValueError(f"remat={self.remat!r} is unknown; use one of {', '.join(Remat)}")
        if self.remat == Remat.DOTS and self.recipe != Baseline.PLAIN:
            raise ValueError(f"remat='dots' is a policy of plain Flax; recipe={self.recipe!r} takes 'none' or 'layer'")
        for name in ("batch", "seq", "gpus"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; use 1 or more")
        if self.batch * self.seq > MOST_TOKENS:
            raise ValueError(
                f"batch={self.batch} of seq={self.seq} is {self.tokens} tokens; one plan covers up to {MOST_TOKENS}"
            )
        if self.gpus > 64:
            raise ValueError(f"gpus={self.gpus}; one plan covers up to 64")
        if self.batch % self.gpus:
            raise ValueError(f"batch={self.batch} sequences do not divide over gpus={self.gpus}; use a multiple of {self.gpus}")
        Master.resolve(self.master)
        if self.master is not None and self.codec == Baseline.OPTAX:
            raise ValueError(f"master={self.master!r} is kept by this library's optimizer; codec='optax' has none")
        if self.fused and (self.recipe == Baseline.PLAIN or self.codec == Baseline.OPTAX):
            raise ValueError("fused updates layers with this library's recipes and codecs; not with 'plain' or 'optax'")

    @functools.cached_property
    def gpu(self) -> devices.Device:
        """The device's description, read once."""
        return devices.named(self.device)

    @property
    def config(self) -> llama.Config:
        """The model's configuration, with bf16 parameters."""
        return llama.preset(self.model, param_dtype=jnp.bfloat16)

    @property
    def tokens(self) -> int:
        """Tokens of one step, over all GPUs."""
        return self.batch * self.seq

    def needed_flops(self) -> float:
        """Operations of one step per GPU with nothing recomputed: weight products 3 times, causal attention 1 + 2.5 times."""
        c = self.config
        q, kv = c.heads * c.head_width, c.kv_heads * c.head_width
        weights = c.layers * c.hidden * (2 * q + 2 * kv + 3 * c.intermediate) + c.hidden * c.vocab_size
        attention = c.layers * 2 * self.seq * q  # two products over half of the keys, per token
        return (6 * weights + 3.5 * attention) * self.tokens / self.gpus

    def replace(self, **changes: Any) -> "PlanConfig":
        """A setting with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def label(self) -> str:
        """A few words for tables: recipe, moments, what is recomputed."""
        parts = [f"{self.recipe}, {self.codec} moments"]
        if self.recipe == Baseline.PLAIN:
            parts = ["BF16, optax.adamw" if self.codec == Baseline.OPTAX else f"BF16, {self.codec} moments"]
        parts += {Remat.DOTS: ["dots policy"], Remat.LAYER: ["full remat"]}.get(Remat(self.remat), [])
        parts += [f"{self.master} masters"] if self.master else []
        return ", ".join(parts + ["fused"] * self.fused)
