"""How often a compiled program rounds arrays of some size to FP8."""

from coat_jax.compiled import hlo


def quantizations(compiled, size):
    """For every conversion of `size` elements from f32 to FP8 in the program, how often one run carries it out."""
    module, found = hlo.parse(compiled.as_text()), []
    for computation, instruction, times in hlo.executed(module):
        called = [module.computations[name] for name in instruction.called] if instruction.opcode == "fusion" else []
        for where, made in [(computation, instruction), *((c, i) for c in called for i in c.instructions.values())]:
            # CPUs move FP8 values about as f16; what was rounded to FP8 comes from f32.
            if made.opcode == "convert" and made.values[0].size == size and made.values[0].dtype.startswith("f8"):
                found += [times] if where.instructions[made.operands[0]].values[0].dtype == "f32" else []
    return found
