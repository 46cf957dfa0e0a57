"""Reading compiled programs, and compiling for GPUs that are not here."""

from coat_jax.compiled.compile import compile_for
from coat_jax.compiled.devices import Device
from coat_jax.compiled.explain import MemoryReport, explain_memory
from coat_jax.compiled.program import Collective, Product, Program, kept_for_backward
from coat_jax.compiled.residuals import Residual
from coat_jax.compiled.topology import PlanError

__all__ = [
    "Collective",
    "Device",
    "Residual",
    "MemoryReport",
    "PlanError",
    "Product",
    "Program",
    "compile_for",
    "explain_memory",
    "kept_for_backward",
]
