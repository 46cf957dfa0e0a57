"""Who computes an operation: plain JAX or the Hopper kernels, and how groups reach the kernels."""

import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from coat_jax.quant.granularity import Groups


class Implementation(enum.StrEnum):
    """Who computes an operation. `None` in an argument of this name leaves the choice to the library."""

    XLA = "xla"
    """Plain JAX, compiled by XLA, on any device."""
    PALLAS = "pallas"
    """The Hopper kernels of `pallas_kernels`."""
    INTERPRET = "interpret"
    """The Hopper kernels, interpreted on the CPU."""

    @classmethod
    def resolve(
        cls,
        implementation: "Implementation | str | None",
        operation: str,
        refusal: str | None = "has no kernel for this operation yet",
    ) -> "Implementation | None":
        """The implementation that will run `operation`; None where a kernel will where the program is for a Hopper GPU.

        Args:
          implementation: as the caller gave it.
          operation: its name, for messages.
          refusal: why no kernel can run it, or None where one can.

        Raises:
          ValueError: an unknown name, or a kernel that cannot run.
        """
        try:
            chosen = None if implementation is None else cls(implementation)
        except ValueError:
            names = ", ".join(repr(str(name)) for name in cls)
            raise ValueError(f"{operation}: implementation={implementation!r} is unknown; use None or one of {names}") from None
        if refusal is None:
            return chosen
        if chosen not in (None, cls.XLA):
            raise ValueError(f"{operation}: implementation={str(chosen)!r} {refusal}; use None or 'xla'")
        return cls.XLA


class Operation(enum.StrEnum):
    """Operations that have kernels."""

    QUANTIZE = "quantize"
    DEQUANTIZE = "dequantize"
    QUANTIZE_TRANSPOSED = "quantize_transposed"
    SCALED_PRODUCT = "scaled_product"
    ELEMENTWISE = "elementwise"
    NORM = "norm"
    NORM_BEFORE_PRODUCT = "norm before a product"
    ADAMW = "coat_adamw"


DEFAULTS: Mapping[Operation, Implementation | None] = {
    Operation.QUANTIZE: Implementation.XLA,  # XLA does it inside its neighbours; a kernel cost 0.2 GB of the 7B step's peak
    Operation.DEQUANTIZE: Implementation.XLA,  # likewise
    Operation.QUANTIZE_TRANSPOSED: None,  # XLA would transpose the numbers, in float32, from which the bytes are computed
    Operation.SCALED_PRODUCT: None,
    Operation.ELEMENTWISE: None,
    Operation.NORM: None,  # on one GPU
    Operation.NORM_BEFORE_PRODUCT: Implementation.XLA,  # fused with the product's quantization; kernels: 50 MiB more peak
    Operation.ADAMW: None,
}
"""Who computes what nobody chose an implementation for: `implementation=None` takes this, and None here is the kernel in
programs for a Hopper GPU and plain JAX in all others."""


COLUMNS = (16, 32, 64, 128, 256)
"""Columns that a block may have in a kernel."""


def refusal(groups: Groups, *, blocks: bool = False) -> str | None:
    """Why no kernel takes these groups, or None. `blocks`: where there is a kernel for blocks over the last two axes."""
    if blocks and groups.axes == (-3, -1) and groups.tile[-1] not in COLUMNS:
        return f"has a kernel for blocks of {', '.join(map(str, COLUMNS))} columns, not of {groups.tile[-1]}"
    if groups.axes not in ((-1,), (-2,), *([(-3, -1)] if blocks else [])):
        return "has kernels for groups along the last axis or the one before only"
    width = max(groups.tile)
    if width % 16 or width > 256:  # the copy engine takes rows of 16 bytes, and the narrowest elements have one
        return f"has kernels for groups of 16, 32, ... 256 elements, not of {width}"
    return None if 0 not in groups.shape else "has no kernel for an empty array"


def shareable(groups: Groups) -> bool:
    """Whether the devices of the mesh in use may share an array of these groups however they like, and none has part of one."""
    devices = max(1, jax.sharding.get_abstract_mesh().size)
    return not groups.ragged and all(groups.scale_shape[axis] % devices == 0 for axis in groups.axes)


def choose(
    kernel: Callable[..., Any],
    plain: Callable[..., Any],
    *args: Any,
    operation: Operation,
    implementation: Implementation | str | None,
    refused: str | None,
    split: Any = None,
    called: str | None = None,
) -> Any:
    """plain(*args), or kernel(*args, interpret=...), as asked, as possible and, for None, as the program's target is.

    With a `split` (`pallas_kernels.partition.Split`) each device of a program for several runs the kernel on its part; it gets
    the keyword `places` there. `called` is the function that a person called, for messages; None is the operation itself.

    Raises:
      ValueError: an unknown implementation, or one that cannot run; for "pallas" on another device when it is compiled.
    """
    called = called or str(operation)
    implementation = DEFAULTS[operation] if implementation is None else implementation
    chosen = Implementation.resolve(implementation, called, refused or _of_64_bits(plain, args))
    if chosen is Implementation.XLA:
        return plain(*args)
    if chosen is Implementation.INTERPRET:
        return kernel(*args, interpret=True)
    from pallas_kernels.dispatch import by_target  # here, so that `import coat_jax` does not load it

    needs = f"{called}: implementation='pallas' runs in programs for one Hopper GPU, or for several with jax.set_mesh or in "
    needs += "jax.shard_map; use None or 'xla'"
    required = None if chosen is None else needs
    return by_target(functools.partial(kernel, interpret=False), plain, *args, required=required, split=split)


def _of_64_bits(plain: Callable[..., Any], args: Sequence[Any]) -> str | None:
    """Why no kernel takes or gives such numbers, which there are where JAX is told to compute in 64 bits; or None."""
    if jax.config.jax_enable_x64:
        wide = [x.dtype for x in jax.tree.leaves((args, jax.eval_shape(plain, *args)))]
        wide = [dtype for dtype in wide if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 4]
        return f"has no kernel for {wide[0]}" if wide else None
    return None


def group_map(
    fn: Callable[..., tuple[jax.Array, ...]],
    leaves: Sequence[Sequence[jax.Array]],
    groups: Sequence[Groups],
    *,
    name: str,
    scalars: Sequence[jax.Array] = (),
    shared: Sequence[jax.Array] = (),
    aliases: Mapping[int, int] | None = None,
    row: int | None = None,
    sums: int = 0,
    numbered: bool = False,
    blocks: int = 4,
    interpret: bool = False,
) -> list[tuple[jax.Array, ...]]:
    """`pallas_kernels.group_map` for arrays laid out by `groups`, one per leaf, all with groups along one axis or in blocks.

    fn takes the keyword `axes` besides tiles: the axes of a tile along which a group lies. `numbers` count the elements of the
    array. Operands of blocks are arrays, not statistics; partial sums stay as they are.
    """
    if groups[0].axes == (-3, -1):
        return _block_map(fn, leaves, groups, name=name, interpret=interpret)
    from pallas_kernels.group_map import group_map as kernel  # here, so that `import coat_jax` does not load Pallas

    [axis] = groups[0].axes

    def call(*tiles: jax.Array, **keywords: Any) -> tuple[jax.Array, ...]:
        return fn(*tiles, axes=(axis,), **keywords)

    def view(x: jax.Array, laid: Groups) -> jax.Array:
        kept = -axis if x.ndim == len(laid.split_shape) else -axis - 1
        return x.reshape(-1, *x.shape[x.ndim - kept :])

    def unview(y: jax.Array, laid: Groups) -> jax.Array:
        split = laid.split_shape
        return y.reshape(split if y.ndim == 1 - axis else split[: len(split) + axis] + split[len(split) + axis + 1 :])

    viewed = [tuple(view(x, laid) for x in leaf) for leaf, laid in zip(leaves, groups, strict=True)]
    options: dict[str, Any] = {
        "name": name,
        "axis": axis,
        "scalars": scalars,
        "aliases": aliases,
        "numbered": numbered,
        "blocks": blocks,
        "interpret": interpret,
    }
    done = kernel(call, viewed, shared=shared, row=row, sums=sums, **options)
    return [
        tuple(unview(y, laid) for y in leaf[: len(leaf) - sums]) + leaf[len(leaf) - sums :]
        for leaf, laid in zip(done, groups, strict=True)
    ]


def _block_map(fn: Callable[..., Any], leaves: Any, groups: Sequence[Groups], *, name: str, interpret: bool) -> Any:
    """`group_map` of blocks, (..., down, rows, across, columns): a tile is a block, and its one number is stored per column."""
    from pallas_kernels.group_map import group_map as kernel  # here, as above

    *_, rows, _, columns = groups[0].split_shape

    def call(*tiles: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(y if y.ndim else jnp.broadcast_to(y, (columns,)) for y in fn(*tiles, axes=(-2, -1)))

    def unview(y: jax.Array, laid: Groups) -> jax.Array:
        *lead, _, across, _ = laid.split_shape
        return y.reshape(laid.split_shape) if y.ndim == 3 else y.reshape(*lead, across, columns)[..., 0]

    viewed = [
        tuple(x.reshape(-1, rows, laid.split_shape[-2] * columns) for x in leaf)
        for leaf, laid in zip(leaves, groups, strict=True)
    ]
    done = kernel(call, viewed, name=name, axis=-2, columns=columns, interpret=interpret)
    return [tuple(unview(y, laid) for y in leaf) for leaf, laid in zip(done, groups, strict=True)]
