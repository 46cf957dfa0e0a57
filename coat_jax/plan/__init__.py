"""The planner: what a training step needs, as XLA compiles it for GPUs that need not be here."""

from coat_jax.compiled import PlanError, compile_for

__all__ = ["PlanError", "compile_for"]
