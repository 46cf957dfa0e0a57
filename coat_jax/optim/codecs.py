"""How Adam's moments are stored: `MomentCodec`, a static value, and the codecs that have a name."""

import dataclasses

from coat_jax.quant import E4M3, E5M2, INT8, UINT8, LogRange, PerGroup, PowerExpansion, QuantSpec, Rounding, Softsign

GROUP = PerGroup(128)


@dataclasses.dataclass(frozen=True)
class MomentCodec:
    """How the first and the second moment of a leaf are stored between steps.

    Attributes:
      mu: spec of the first moment; None keeps it in float32.
      nu: spec of the second moment; None keeps it in float32. Its granularity is mu's.
      relative: whether mu is stored as the update direction r = mu / sqrt(nu), with nu as it will be read back. The
        distribution of r does not depend on how the scale of gradients varies inside a group.
      antithetic: whether stochastic rounding uses each random number u twice, as u in an even step and 1 - u in the next. The
        errors of both then cancel in part: measured, 15 to 20 % less error of the update with a logarithmic nu. With a
        `PowerExpansion`, whose grid moves between the two, it biased nu by 13 %: leave it off there.

    Raises:
      ValueError: specs of two granularities, one without groups along an axis, or a nu that may lose non-zero elements.
    """

    mu: QuantSpec | None
    nu: QuantSpec | None
    relative: bool = False
    antithetic: bool = False

    def __post_init__(self):
        specs = [spec for spec in (self.mu, self.nu) if spec is not None]
        for spec in specs:
            if not isinstance(spec.granularity, PerGroup):
                raise ValueError(f"MomentCodec: granularity={spec.granularity!r}; moments are stored in PerGroup(size)")
        if len({spec.granularity for spec in specs}) > 1:
            raise ValueError(f"MomentCodec: mu is {self.mu}, nu is {self.nu}; give both the same granularity")
        if self.nu is not None and not self.nu.keep_nonzero:
            raise ValueError(f"MomentCodec: nu={self.nu}; a second moment needs keep_nonzero=True, or live mu is divided by 0")

    @property
    def quantizes(self) -> bool:
        """Whether any moment is stored in one byte."""
        return self.mu is not None or self.nu is not None

    @property
    def stochastic(self) -> bool:
        """Whether any moment is rounded stochastically."""
        return any(spec is not None and spec.rounding is Rounding.STOCHASTIC for spec in (self.mu, self.nu))

    def along(self, groups: PerGroup) -> "MomentCodec":
        """The same codec with these groups."""

        def turn(spec: QuantSpec | None) -> QuantSpec | None:
            return None if spec is None else dataclasses.replace(spec, granularity=groups)

        return dataclasses.replace(self, mu=turn(self.mu), nu=turn(self.nu))


COAT = MomentCodec(
    mu=QuantSpec(E4M3, GROUP, PowerExpansion()),
    nu=QuantSpec(E4M3, GROUP, PowerExpansion(), Rounding.STOCHASTIC, keep_nonzero=True),
)
"""COAT's: E4M3 with dynamic range expansion for both moments. 2.08 bytes per parameter."""

COAT_E5M2 = dataclasses.replace(
    COAT, nu=QuantSpec(E5M2, GROUP, PowerExpansion(E5M2.max**2 / 2), Rounding.STOCHASTIC, keep_nonzero=True)
)
"""COAT's second choice: mu in E4M3, nu in E5M2, both expanded."""

PLAIN_FP8 = MomentCodec(mu=QuantSpec(E4M3, GROUP), nu=QuantSpec(E4M3, GROUP, None, Rounding.STOCHASTIC, keep_nonzero=True))
"""E4M3 with plain scaling: the baseline that expansion is measured against."""

LOG_RELATIVE = MomentCodec(
    mu=QuantSpec(INT8, GROUP, Softsign()),
    nu=QuantSpec(UINT8, GROUP, LogRange(octaves=40), Rounding.STOCHASTIC, keep_nonzero=True),
    relative=True,
    antithetic=True,
)
"""nu on a logarithmic grid of 255 steps, and mu relative to sqrt(nu) in 8 companded bits. 2.07 bytes per parameter."""

FLOAT32 = MomentCodec(mu=None, nu=None)
"""Both moments in float32: `optax.adamw` itself."""

_NAMED = (
    ("coat", COAT),
    ("coat_e5m2", COAT_E5M2),
    ("plain_fp8", PLAIN_FP8),
    ("log_relative", LOG_RELATIVE),
    ("float32", FLOAT32),
)


def names() -> tuple[str, ...]:
    """Names that `named` knows."""
    return tuple(name for name, _ in _NAMED)


def named(name: str) -> MomentCodec:
    """The codec called `name`.

    Raises:
      ValueError: an unknown name.

    Example:
      >>> from coat_jax import codecs
      >>> codecs.named("coat") == codecs.COAT
      True
    """
    for known, codec in _NAMED:
        if known == name:
            return codec
    raise ValueError(f"codec={name!r} is unknown; use one of {', '.join(names())}")
