"""Where an amax comes from, and where it goes: measured or given, and handed out or not."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from coat_jax.quant import codec
from coat_jax.quant.granularity import Groups
from coat_jax.quant.spec import QuantSpec


class Amax(NamedTuple):
    """The amax of one array that is quantized.

    Attributes:
      given: float32 of the scales' shape, or a scalar for one scale: what the array is scaled by. Larger elements saturate.
        None: the array's own amax, which takes a pass over it.
      out: a `jax.Ref` of the same shape into which the array's own amax is written, whatever it is scaled by; None: nowhere. It
        is inf where the array holds a NaN or an inf.

    With amaxes of earlier steps as `given` and `out` read after each step this is what delayed scaling needs.
    """

    given: jax.Array | None = None
    out: jax.Ref | None = None


def measured_amax(x: jax.Array, spec: QuantSpec) -> jax.Array:
    """amax = max |x| of every group, as `quantize(x, spec)` measures it.

    Args:
      x: floating point, of any shape.
      spec: its granularity says what the groups are.

    Returns:
      float32 of the scales' shape; at least 2^-126, inf for a group with a NaN or an inf.

    Example:
      >>> import jax.numpy as jnp
      >>> from coat_jax import E4M3, PerTensor, QuantSpec
      >>> print(measured_amax(jnp.array([1.0, -3.0]), QuantSpec(E4M3, PerTensor())))
      [3.]
    """
    groups = Groups.of(spec.granularity, x.shape)
    return codec.group_amax(groups.split(x.astype(jnp.float32)), groups.axes).reshape(groups.scale_shape)
