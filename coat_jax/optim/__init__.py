"""Optimizer: AdamW whose moments take one byte each, as Optax transformations."""

from coat_jax.optim import codecs
from coat_jax.optim.adamw import STATIC_ARGS, coat_adamw, scale_by_coat_adam
from coat_jax.optim.codecs import MomentCodec
from coat_jax.optim.master import Master
from coat_jax.optim.sharding import state_specs
from coat_jax.optim.state import CoatAdamState, StoredMoment

__all__ = [
    "STATIC_ARGS",
    "CoatAdamState",
    "Master",
    "MomentCodec",
    "StoredMoment",
    "coat_adamw",
    "codecs",
    "scale_by_coat_adam",
    "state_specs",
]
