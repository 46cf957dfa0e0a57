"""The oracle: which codes, scales and exponents must come out, group by group in NumPy float64. Imports nothing of ours.

Two places follow float32 on purpose, because the definition does: a scale is a float32 (or bfloat16) number, amax * (1 / max)
without expansion, and a payload without expansion is cast once from the float32 product x * (1 / scale). A float64 product
of two float32 numbers is exact, so rounding it once gives the float32 one. Everything else is float64.
"""

import dataclasses

import ml_dtypes
import numpy as np

TINY = 2.0**-126
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0, "uint8": 255.0}


def value(name: str, code: int) -> float:
    """The number that one FP8 code stands for, bit by bit: E4M3 has bias 7 and no inf, E5M2 has bias 15 and is IEEE-like."""
    bits, bias = (3, 7) if name == "e4m3" else (2, 15)
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> bits, code & (2**bits - 1)
    if name == "e4m3" and code & 0x7F == 0x7F:
        return np.nan
    if name == "e5m2" and exponent == 31:
        return np.nan if mantissa else sign * np.inf
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - bits)
    return sign * (2**bits + mantissa) * 2.0 ** (exponent - bias - bits)


def magnitudes(name: str) -> np.ndarray:
    """Finite magnitudes of a format, ascending from 0. A position in this table is the code, even where the code is even."""
    if name in ("int8", "uint8"):
        return np.arange(LARGEST[name] + 1)
    table = np.array([value(name, code) for code in range(128)])
    return table[np.isfinite(table)]


def nearest(y: np.ndarray, name: str) -> np.ndarray:
    """Position of the magnitude nearest to y >= 0 in the table, ties to even, saturating."""
    table = magnitudes(name)
    middles = (table[1:] + table[:-1]) / 2
    below = np.searchsorted(middles, y, side="left")
    tie = (below < len(middles)) & (middles[np.minimum(below, len(middles) - 1)] == y) & (below % 2 == 1)
    return below + tie


def boundary_distance(y: np.ndarray, name: str) -> np.ndarray:
    """Distance of y from the closest point where the nearest code changes."""
    table = magnitudes(name)
    middles = (table[1:] + table[:-1]) / 2
    above = np.searchsorted(middles, y)
    left, right = middles[np.maximum(above - 1, 0)], middles[np.minimum(above, len(middles) - 1)]
    return np.minimum(np.abs(y - left), np.abs(y - right))


def fit(expansion: str, ratio: float, target: float = 100_352.0, octaves: float = 24.0) -> tuple[int, float]:
    """The stored exponent of a group whose smallest non-zero ratio is `ratio`, and its value before rounding."""
    if expansion == "power":  # 16 k with k = log(target) / log(1 / ratio), rounded down, one byte
        exact = 16 * np.log(target) / -np.log(ratio) if ratio < 1 else np.inf
        return int(np.floor(np.clip(exact, 1, 255))), exact
    exact = -4 * np.log2(ratio)  # 4 L, rounded up
    return int(np.ceil(np.clip(exact, 1, 4 * octaves))), exact


def expand(expansion: str, ratio: np.ndarray, exponent: int | None, name: str) -> np.ndarray:
    """Magnitude in the code domain of non-zero ratios."""
    top = LARGEST[name]
    if expansion == "power":
        return top * ratio ** (exponent / 16)
    if expansion == "log":
        return np.maximum(1 + (top - 1) * (1 + np.log2(ratio) / (exponent / 4)), 1)
    return top * 2 * ratio / (1 + ratio)


def contract(expansion: str, y: np.ndarray, exponent: int | None, name: str) -> np.ndarray:
    """Ratio of non-zero magnitudes in the code domain."""
    top = LARGEST[name]
    if expansion == "power":
        return (y / top) ** (16 / exponent)
    if expansion == "log":
        return 2.0 ** (((y - 1) / (top - 1) - 1) * exponent / 4)
    return (y / top) / (2 - y / top)


@dataclasses.dataclass
class Encoded:
    """Of every element: position in the table of magnitudes, sign, y before rounding. Of every group: scale, exponent."""

    code: np.ndarray
    negative: np.ndarray
    y: np.ndarray
    scale: np.ndarray
    exponent: np.ndarray
    exact_exponent: np.ndarray

    def payload(self, name: str) -> np.ndarray:
        """The bytes that must be stored."""
        if name in ("int8", "uint8"):
            return np.where(self.negative, -self.code, self.code).astype(np.int16).astype(np.uint8)
        return (self.code | np.where(self.negative, 0x80, 0)).astype(np.uint8)


def stored_scale(amax: float, name: str, expanded: bool, bf16: bool) -> np.float32:
    """amax, or amax / max without expansion, as the scale's dtype keeps it, in [2^-126, 2^126], ties to even."""
    scale = (
        np.float32(amax) if expanded else np.float32(np.float64(np.float32(amax)) * np.float64(np.float32(1 / LARGEST[name])))
    )
    scale = min(max(scale, np.float32(TINY)), np.float32(1 / TINY))
    return np.float32(scale.astype(ml_dtypes.bfloat16)) if bf16 else scale


def tiles(shape: tuple[int, ...], tile: tuple[int, ...]) -> dict[tuple[int, ...], tuple[slice, ...]]:
    """Index of every group, and the slice of the array that it covers; the last along an axis may be shorter."""
    grid = tuple(-(-n // t) for n, t in zip(shape, tile, strict=True))
    return {i: tuple(slice(a * t, (a + 1) * t) for a, t in zip(i, tile, strict=True)) for i in np.ndindex(grid)}


def encode(
    x: np.ndarray,
    name: str,
    tile: tuple[int, ...],
    expansion: str | None = None,
    *,
    bf16_scales: bool = False,
    keep_nonzero: bool = False,
    exponents: np.ndarray | None = None,
) -> Encoded:
    """Encodes every tile of x, a finite array. `exponents` replaces the fitted ones."""
    x = np.asarray(x, np.float64)
    a = np.where(np.abs(x) >= TINY, np.abs(x), 0.0)
    groups = tiles(x.shape, tile)
    grid = tuple(-(-n // t) for n, t in zip(x.shape, tile, strict=True))
    y, scale = np.zeros(x.shape), np.zeros(grid, np.float32)
    exponent, exact = np.zeros(grid, np.int64), np.zeros(grid)
    for index, where in groups.items():
        group = a[where]
        live = group[group > 0]
        amax = live.max(initial=TINY)
        scale[index] = stored_scale(amax, name, expansion is not None, bf16_scales)
        if expansion in ("power", "log"):
            exponent[index], exact[index] = fit(expansion, max(live.min(initial=amax) / amax, TINY))
            if exponents is not None:
                exponent[index] = exponents[index]
        if expansion is None:
            y[where] = (group * np.float64(np.float32(1) / scale[index])).astype(np.float32)
        else:
            ratio = np.minimum(group / np.float64(scale[index]), 1.0)
            ratio = np.where(group > 0, np.maximum(ratio, TINY), 1.0)
            y[where] = np.where(group > 0, expand(expansion, ratio, int(exponent[index]), name), 0.0)
    if keep_nonzero:
        y = np.where(a > 0, np.maximum(y, magnitudes(name)[1]), 0.0)
    return Encoded(nearest(y, name), (x < 0) & (a > 0), y, scale, exponent, exact)


def decode(
    magnitude: np.ndarray, negative: np.ndarray, scale: np.ndarray, exponent: np.ndarray | None, tile: tuple[int, ...],
    name: str, expansion: str | None,
) -> np.ndarray:  # fmt: skip
    """The float64 values of magnitudes in the code domain, exact up to float64; 0 decodes to 0."""
    out = np.zeros(magnitude.shape)
    for index, where in tiles(magnitude.shape, tile).items():
        y, k = magnitude[where], None if exponent is None else int(exponent[index])
        ratio = y if expansion is None else contract(expansion, np.where(y > 0, y, LARGEST[name]), k, name)
        out[where] = np.where(y > 0, ratio * np.float64(scale[index]), 0.0)
    return np.where(negative, -out, out)
