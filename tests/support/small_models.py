"""Small models of every architecture that is read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax import ops
from coat_jax.models import llama

SMALL = {"vocab_size": 32, "hidden": 16, "intermediate": 24, "layers": 3, "heads": 4, "kv_heads": 2, "dtype": jnp.float32}
CONFIGS = {
    "llama": llama.Config(**SMALL),
    "llama, tied, scaled": llama.Config(**SMALL, tied_head=True, rope_scaling=ops.Llama3Scaling(8.0, 1.0, 4.0, 4)),
    "llama, biased": llama.Config(**SMALL, qkv_bias=True, o_bias=True),
    "qwen2": llama.Config(**SMALL, qkv_bias=True, norm_eps=1e-6, rope_theta=1e6),
    "qwen3": llama.Config(**SMALL, qk_norm=True, head_dim=8),
}


@functools.cache
def shapes(config):
    """Of the parameters."""
    return jax.eval_shape(llama.Llama(config).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]


def parameters(config, dtype=np.float32):
    """Random numbers for every parameter."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape).astype(dtype)), shapes(config))


def same_bits(a, b):
    """Whether two trees hold the same arrays: structure, dtypes, shapes, bits."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all((x.dtype, x.shape, np.asarray(x).tobytes()) == (y.dtype, y.shape, np.asarray(y).tobytes()) for x, y in pairs)
