"""The planner: what a training step needs, as XLA compiles it for GPUs that need not be here."""

from coat_jax.plan.compile import compile_for
from coat_jax.plan.devices import Device
from coat_jax.plan.explain import MemoryReport, explain_memory
from coat_jax.plan.kept import Kept
from coat_jax.plan.program import Collective, Product, Program, kept_for_backward
from coat_jax.plan.topology import PlanError

__all__ = [
    "Collective",
    "Device",
    "Kept",
    "MemoryReport",
    "PlanError",
    "Product",
    "Program",
    "compile_for",
    "explain_memory",
    "kept_for_backward",
]
