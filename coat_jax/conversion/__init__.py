"""Models of others in FP8: their layers swapped by rules, their parameters where they were."""

from coat_jax.conversion.converting import convert
from coat_jax.conversion.rules import KEEP, Report, Swap, SwiGLU

__all__ = ["KEEP", "Report", "Swap", "SwiGLU", "convert"]
