"""What FP8 rounding may do to a result. Every tolerance of the tests of ops is made of these.

A code of m explicit mantissa bits is off by at most half a step: 2^-(m+1) of a normal value, and half of the smallest code
(times the scale) of a value below the normal range. Over many values the error is uniform in that interval, so its root mean
square is at most 2^-(m+1) / sqrt(3) of the value; errors of independent operands of a product add in squares.
"""

import jax.numpy as jnp
import numpy as np

E4M3_WORST, E5M2_WORST = 2.0**-4, 2.0**-3
E4M3_RMS, E5M2_RMS = E4M3_WORST / np.sqrt(3), E5M2_WORST / np.sqrt(3)
E4M3_SMALLEST = 2.0**-9 / 448  # of a group's amax
BF16 = 2.0**-8  # one rounding of a result


def stash_error(x, size):
    """The largest |decode(encode(x)) - x| of every element of x in E4M3 groups of `size` along the last axis."""
    x = np.abs(np.asarray(x, np.float64))
    pad = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)]
    groups = np.pad(x, pad).reshape(*x.shape[:-1], -(-x.shape[-1] // size), size)
    amax = np.repeat(groups.max(-1, initial=0), size, axis=-1)[..., : x.shape[-1]]
    return np.maximum(E4M3_WORST * x, 0.51 * E4M3_SMALLEST * amax)


def relative(a, b):
    """|a - b| / |b| in the Euclidean norm, float64."""
    a, b = (np.asarray(v.astype(jnp.float32), np.float64) for v in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def in_squares(*errors):
    """The error of a product whose operands have these independent errors."""
    return float(np.sqrt(np.sum(np.square(errors))))
