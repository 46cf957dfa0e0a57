"""The harness of benches: functions whose results go into buffers that held something else, run by turns, timed."""

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

POISONS = (0xFF, 0x5A)
"""Bytes that buffers of results are filled with: NaN in every float, and plausible numbers."""


def poison(like: Any, byte: int) -> jax.Array:
    """An array of this shape and dtype whose every byte is `byte`."""
    itemsize = jnp.dtype(like.dtype).itemsize
    raw = jnp.full((*like.shape, itemsize) if itemsize > 1 else like.shape, byte, jnp.uint8)
    return jax.lax.bitcast_convert_type(raw, like.dtype)


class Contender:
    """A function compiled for operands of some shapes, whose results are written over other arrays.

    A result takes the buffer of a donated operand of its shape and dtype, where there is one left, else that of a blank array:
    so one that is not written shows what was in the buffer before.

    Attributes:
      flat: the function of the operands' leaves and of blanks to its results' leaves.
      shapes: of what flat takes.
      overwritten: numbers of what it takes whose buffers it uses up.
      blanks: shapes and dtypes of the results that take no operand's buffer.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], donated: Sequence[int] = ()):
        """function for operands like args, of which the numbers in `donated` are updated in place."""
        # AdamW of one leaf: results are the parameter, payloads and scales, operands gradient, state and parameter. State and
        # parameter are donated, so each result takes the buffer of its like. A quantize has nothing donated: its payload and
        # its scales go into blanks, full of bytes that a kernel which forgets to write would leave.
        leaves, tree = jax.tree.flatten(tuple(args))
        given = [i in donated for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
        results, self._results = jax.tree.flatten(jax.eval_shape(function, *args))
        free = [i for i, there in enumerate(given) if there]
        self._taken: list[int | None] = []  # for each result, the operand whose buffer it takes
        for result in results:
            fits = [i for i in free if (leaves[i].shape, leaves[i].dtype) == (result.shape, result.dtype)]
            self._taken.append(fits[0] if fits else None)
            free = [i for i in free if i not in fits[:1]]
        self.blanks = [r for r, place in zip(results, self._taken, strict=True) if place is None]
        self._count = len(leaves)

        def flat(*xs: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(function(*jax.tree.unflatten(tree, xs[: len(leaves)])))

        self.flat = flat
        self.shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*leaves, *self.blanks)]
        over = (place for place in self._taken if place is not None)
        self.overwritten = (*over, *range(len(leaves), len(self.shapes)))

    @functools.cached_property
    def compiled(self) -> Any:
        """The program."""
        return jax.jit(self.flat, donate_argnums=self.overwritten, keep_unused=True).lower(*self.shapes).compile()

    @property
    def covered(self) -> bool:
        """Whether the program really writes every result over what it was given."""
        results = jax.tree.leaves(self.compiled.out_info)
        memory: Any = self.compiled.memory_analysis()
        return memory.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in results)

    def start(self, args: Sequence[Any], byte: int = POISONS[0]) -> list[jax.Array]:
        """Buffers for a first call: the operands, those to be overwritten copied, and blanks full of `byte`."""
        leaves = jax.tree.leaves(tuple(args))
        copied = [jnp.array(x) if i in self._taken else x for i, x in enumerate(leaves)]
        return [*copied, *(poison(blank, byte) for blank in self.blanks)]

    def call(self, buffers: list[jax.Array]) -> list[jax.Array]:
        """Flat results of one call, which uses the buffers up."""
        return self.compiled(*buffers)

    def again(self, buffers: list[jax.Array]) -> list[jax.Array]:
        """Buffers for the next call, after one: results have taken the places of what they were written over."""
        results = self.call(buffers)
        following, blank = list(buffers[: self._count]), []
        for place, result in zip(self._taken, results, strict=True):
            if place is None:
                blank.append(result)
            else:
                following[place] = result
        return following + blank

    def results(self, flat: Sequence[jax.Array]) -> Any:
        """Flat results as the function's."""
        return jax.tree.unflatten(self._results, flat)

    def poisoned(self, args: Sequence[Any]) -> Any:
        """The results, after two calls into buffers full of different bytes.

        Raises:
          ArithmeticError: they differ, so part of a result was never written.
        """
        first, second = (self.call(self.start(args, byte)) for byte in POISONS)
        same = jax.jit(lambda a, b: jnp.stack([jnp.all(_bits(x) == _bits(y)) for x, y in zip(a, b, strict=True)]))
        if not bool(jnp.all(same(first, second))):
            raise ArithmeticError("results depend on what their buffers held before: not all of them is written")
        return self.results(second)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def by_turns(
    contenders: Mapping[str, tuple[Contender, Sequence[Any]]], *, repeats: int = 9, span: float = 0.02
) -> dict[str, list[float]]:
    """Seconds of one call of each contender on its operands, `repeats` samples of about `span` seconds, taken in turns.

    Calls follow each other without waiting, so what is timed is the device where a call takes it longer than the host.
    """
    states, counts = {}, {}
    for name, (contender, args) in contenders.items():
        state = jax.block_until_ready(contender.again(jax.block_until_ready(contender.start(args))))
        begun = time.perf_counter()
        states[name] = jax.block_until_ready(contender.again(state))
        counts[name] = max(1, min(1000, int(span / (time.perf_counter() - begun))))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, (contender, _) in contenders.items():
            state, count = states[name], counts[name]
            begun = time.perf_counter()
            for _ in range(count):
                state = contender.again(state)
            states[name] = jax.block_until_ready(state)
            samples[name].append((time.perf_counter() - begun) / count)
    return samples


def median(samples: Sequence[float]) -> float:
    """The middle one."""
    return statistics.median(samples)
