"""`QuantizedArray`: payload, scales and exponents of one array as a pytree. A container without arithmetic."""

from typing import Any

import jax
import numpy as np

from coat_jax.quant.granularity import Groups
from coat_jax.quant.spec import QuantSpec


@jax.tree_util.register_pytree_with_keys_class
class QuantizedArray:
    """An array of `dtype`, kept as one byte per element and one scale (and exponent) per group.

    Attributes:
      payload: codes; their shape is the array's.
      scale: multiplies on decode; as many axes as the payload, one entry per group.
      exponent: uint8 of the scale's shape where the expansion is fitted per group, else None.
      spec: the `QuantSpec`, static.
      dtype: dtype of the array that this stands for, static.

    Raises:
      ValueError, TypeError: shapes or dtypes that contradict the spec. (Unflattening does not check: tree functions put
        shapes, shardings and specs in the leaves.)
    """

    __slots__ = ("dtype", "exponent", "payload", "scale", "spec")

    def __init__(self, payload: jax.Array, scale: jax.Array, exponent: jax.Array | None, spec: QuantSpec, dtype: Any):
        groups = Groups.of(spec.granularity, payload.shape)
        if payload.dtype != spec.format.dtype:
            raise TypeError(f"QuantizedArray: payload has dtype {payload.dtype}, the spec says {spec.format.dtype}")
        if tuple(scale.shape) != groups.scale_shape:
            raise ValueError(
                f"QuantizedArray: scale has shape {tuple(scale.shape)}; {spec.granularity} over {tuple(payload.shape)} has "
                f"{groups.scale_shape}"
            )
        if scale.dtype != spec.scale_dtype:
            raise TypeError(f"QuantizedArray: scale has dtype {scale.dtype}, the spec says {spec.scale_dtype}")
        if (exponent is not None) != spec.has_exponent:
            raise TypeError(f"QuantizedArray: exponent is {exponent!r}, the spec is {spec}")
        if exponent is not None and (exponent.shape != scale.shape or exponent.dtype != np.uint8):
            raise TypeError(f"QuantizedArray: exponent is {exponent.dtype}{exponent.shape}, not uint8{tuple(scale.shape)}")
        self.payload, self.scale, self.exponent = payload, scale, exponent
        self.spec, self.dtype = spec, np.dtype(dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.payload.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.payload.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.payload.size

    @property
    def nbytes(self) -> int:
        """Bytes of payload, scales and exponents together."""
        parts = (self.payload, self.scale, self.exponent)
        return sum(part.size * np.dtype(part.dtype).itemsize for part in parts if part is not None)

    def __repr__(self) -> str:
        shape = getattr(self.payload, "shape", None)  # tree functions put anything in the leaves
        return f"QuantizedArray({self.dtype}{list(shape) if isinstance(shape, tuple) else []} as {self.spec})"

    def tree_flatten_with_keys(self):
        """Leaves payload, scale, exponent, each under its name; spec and dtype are static."""
        key = jax.tree_util.GetAttrKey
        names = ("payload", "scale", "exponent")
        return tuple((key(name), getattr(self, name)) for name in names), (self.spec, self.dtype)

    @classmethod
    def tree_unflatten(cls, static, leaves) -> "QuantizedArray":
        """The inverse of flattening, without checks."""
        self = object.__new__(cls)
        self.payload, self.scale, self.exponent = leaves
        self.spec, self.dtype = static
        return self
