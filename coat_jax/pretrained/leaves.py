"""Which tensors of a file a parameter of the model is made of: names, shapes, and who is transposed."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from coat_jax.models import llama
from coat_jax.ops import blocks

IGNORED = (".rotary_emb.inv_freq",)
"""Endings of tensors that older files hold and that follow from the configuration."""
HEAD = "lm_head.weight"

_PLACES = {
    "attention": "self_attn.{}_proj",
    "mlp": "mlp.{}_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter and the tensors that it is made of.

    Attributes:
      path: keys in the parameter tree.
      name: of the tensor; with {} in place of the layer's number where layers are stacked.
      row: shape of one layer's parameter, or of the parameter where there is no stack.
      layers: how many are stacked; None is no stack.
      transposed: kernels are (in, out) here and (out, in) in files.
    """

    path: tuple[str, ...]
    name: str
    row: tuple[int, ...]
    layers: int | None
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter."""
        return self.row if self.layers is None else (self.layers, *self.row)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of each tensor in the file."""
        return self.row[::-1] if self.transposed else self.row

    def names(self) -> Iterator[str]:
        """Of the tensors, one after the other."""
        return iter([self.name]) if self.layers is None else (self.name.format(i) for i in range(self.layers))

    def turned(self, x: np.ndarray) -> np.ndarray:
        """A tensor of the file as the parameter has it, or the other way: a view."""
        return x.T if self.transposed else x


def copy_numbers(into: np.ndarray, x: np.ndarray) -> None:
    """into[...] = x, of two arrays of one shape, cast where their dtypes differ.

    A transposed matrix goes in strips of 16 columns, which lie together in its file: each line of the cache is read and written
    once, and one core copies 374 instead of 113 million bfloat16 numbers a second.
    """
    if x.dtype == into.dtype:  # bits are copied, which NumPy does faster for its own dtypes
        into, x = (array.view(f"u{array.dtype.itemsize}") for array in (into, x))
    if x.ndim == 2 and not x.flags.c_contiguous:
        for i in range(0, x.shape[1], 16):
            into[:, i : i + 16] = x[:, i : i + 16]
    else:
        into[...] = x


def leaves_of(config: llama.Config) -> list[Leaf]:
    """The parameters of `llama.Llama(config)`, in the order in which their tensors are written.

    Example:
      >>> from coat_jax.models import llama
      >>> leaf = leaves_of(llama.preset("llama3.2-1b"))[1]
      >>> "/".join(leaf.path), next(leaf.names()), leaf.shape
      ('layers/attention_norm/scale', 'model.layers.0.input_layernorm.weight', (16, 2048))
    """
    c = config
    attention = blocks.attention_shapes(c, c.hidden)
    found = [Leaf(("embed", "embedding"), "model.embed_tokens.weight", (c.vocab_size, c.hidden), None, False)]

    def layer(place: str, path: tuple[str, ...], row: tuple[int, ...]) -> None:
        kind = "bias" if path[-1] == "bias" else "weight"
        name = f"model.layers.{{}}.{place}.{kind}"
        found.append(Leaf(("layers", *path), name, row, c.layers, path[-1] == "kernel"))

    def kernels(block: str, shapes: blocks.Shapes, biased: tuple[str, ...]) -> None:
        for name, shape in shapes.items():
            place = _PLACES[block].format(name)
            layer(place, (block, name, "kernel"), shape)
            if name in biased:
                layer(place, (block, name, "bias"), shape[1:])

    layer(_PLACES["attention_norm"], ("attention_norm", "scale"), (c.hidden,))
    kernels("attention", attention, (*("q", "k", "v") * c.qkv_bias, *("o",) * c.o_bias))
    for name in ("q_norm", "k_norm") * c.qk_norm:
        layer(f"self_attn.{name}", ("attention", name, "scale"), (c.head_width,))
    layer(_PLACES["mlp_norm"], ("mlp_norm", "scale"), (c.hidden,))
    kernels("mlp", blocks.swiglu_shapes(c.intermediate, c.hidden), ())
    found.append(Leaf(("norm", "scale"), "model.norm.weight", (c.hidden,), None, False))
    if not c.tied_head:
        found.append(Leaf(("head", "kernel"), HEAD, (c.hidden, c.vocab_size), None, True))
    return found
