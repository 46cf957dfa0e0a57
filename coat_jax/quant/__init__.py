"""Numbers: formats, groups, expansion, and arrays of one byte per element."""

from coat_jax.quant.array import QuantizedArray
from coat_jax.quant.expansion import LogRange, PowerExpansion, Softsign
from coat_jax.quant.formats import E4M3, E5M2, INT8, UINT8, Format
from coat_jax.quant.granularity import Granularity, Groups, PerBlock, PerGroup, PerTensor
from coat_jax.quant.implementation import Implementation
from coat_jax.quant.product import scaled_product
from coat_jax.quant.quantize import dequantize, quantize
from coat_jax.quant.rounding import Rounding
from coat_jax.quant.scaling import Amax, measured_amax
from coat_jax.quant.spec import QuantSpec

__all__ = [
    "E4M3",
    "Amax",
    "E5M2",
    "INT8",
    "UINT8",
    "Format",
    "Granularity",
    "Groups",
    "Implementation",
    "LogRange",
    "PerBlock",
    "PerGroup",
    "PerTensor",
    "PowerExpansion",
    "QuantSpec",
    "QuantizedArray",
    "Rounding",
    "Softsign",
    "dequantize",
    "measured_amax",
    "quantize",
    "scaled_product",
]
