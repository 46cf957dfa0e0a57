"""`QuantSpec`: everything static about a quantized array, as one hashable value."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from coat_jax.quant.expansion import Expansion
from coat_jax.quant.formats import Format
from coat_jax.quant.granularity import Granularity
from coat_jax.quant.rounding import Rounding


@dataclasses.dataclass(frozen=True)
class QuantSpec:
    """How an array is quantized.

    Attributes:
      format: number format of the payload.
      granularity: which elements share a scale.
      expansion: how a group's range is laid over the codes; None is plain scaling, x = payload * scale.
      rounding: how a value between two codes chooses one.
      scale_dtype: dtype of the scales, float32 or bfloat16.
      keep_nonzero: whether a non-zero element keeps a non-zero code, however small (needed by second moments, wrong for first).

    Raises:
      TypeError: an argument of another type, or a scale_dtype that is neither float32 nor bfloat16.
      ValueError: an unknown rounding.

    Example:
      >>> from coat_jax import E4M3, PerGroup, QuantSpec
      >>> print(QuantSpec(E4M3, PerGroup(128)))
      e4m3, group 128, float32 scales
    """

    format: Format
    granularity: Granularity
    expansion: Expansion | None = None
    rounding: Rounding = Rounding.NEAREST
    scale_dtype: np.dtype = np.dtype(np.float32)
    keep_nonzero: bool = False

    def __post_init__(self):
        if not isinstance(self.format, Format):
            raise TypeError(f"QuantSpec: format={self.format!r} is not a Format; use coat_jax.E4M3 or coat_jax.E5M2")
        if isinstance(self.granularity, type) or not hasattr(self.granularity, "tile"):
            raise TypeError(f"QuantSpec: granularity={self.granularity!r}; use PerTensor(), PerGroup(size) or PerBlock(block)")
        if self.expansion is not None and (isinstance(self.expansion, type) or not hasattr(self.expansion, "expand")):
            raise TypeError(f"QuantSpec: expansion={self.expansion!r}; use PowerExpansion() or None")
        if self.rounding not in tuple(Rounding):
            raise ValueError(f"QuantSpec: rounding={self.rounding!r}; use 'nearest' or 'stochastic'")
        object.__setattr__(self, "rounding", Rounding(self.rounding))
        object.__setattr__(self, "scale_dtype", np.dtype(self.scale_dtype))
        if self.scale_dtype not in (np.dtype(np.float32), np.dtype(jnp.bfloat16)):
            raise TypeError(f"QuantSpec: scale_dtype={self.scale_dtype}; use float32 or bfloat16")

    @property
    def has_exponent(self) -> bool:
        """Whether every group stores an exponent beside its scale."""
        return self.expansion is not None and self.expansion.fitted

    def __str__(self) -> str:
        parts = [str(self.format), str(self.granularity), f"{self.scale_dtype} scales"]
        if self.expansion is not None:
            parts.insert(2, type(self.expansion).__name__)
        if self.rounding is Rounding.STOCHASTIC:
            parts.append("stochastic rounding")
        return ", ".join(parts)
