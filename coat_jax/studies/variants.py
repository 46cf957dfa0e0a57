"""The variants of a comparison: one model shape and one schedule, trained with different recipes and optimizers."""

import dataclasses
import math
from collections.abc import Callable

import optax

from coat_jax import recipes
from coat_jax.fused_step.llama import layered_llama
from coat_jax.fused_step.options import Clip
from coat_jax.fused_step.step import fused_step
from coat_jax.models import llama
from coat_jax.optim import coat_adamw
from coat_jax.train import data
from coat_jax.train.loop import Variant

VARIANTS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "bf16": optax.adamw,
    "coat": coat_adamw,
    "lean": coat_adamw,
    "blocks": coat_adamw,
}
"""Names of variants, which are those of their recipes, and the optimizer of each."""

FUSED = "+fused"
"""Behind the name of a variant: each layer is updated inside the backward pass."""


RANGES = {
    "steps": (1, 10**9),  # optimizers count in int32
    "batch": (1, 10**6),
    "seq": (2, 10**6),
    "seed": (0, 2**32 - 1),  # of JAX's keys
    "validation_batches": (1, 10**6),
}
"""The least and the largest number that the fields of a `StudyConfig` take."""


def check_count(name: str, value: int, least: int, most: int) -> None:
    """Refuses a number beyond its range.

    Raises:
      ValueError: the number is smaller than `least` or larger than `most`.
    """
    if not least <= value <= most:
        raise ValueError(f"{name}={value}; use {f'{least} or more' if value < least else f'{most} at most'}")


@dataclasses.dataclass(frozen=True)
class StudyConfig:
    """What a comparison trains. Parameters are f32, products bf16 or FP8; moments f32 with BF16, FP8 with the others.

    Attributes:
      preset: shape of the model, a name of `coat_jax.models.llama`.
      variants: names of `VARIANTS`, the first is the one that others are compared with; "lean+fused" trains "lean" with each
        layer updated inside the backward pass.
      steps: optimizer steps.
      batch: sequences in a batch.
      seq: tokens in a sequence.
      seed: initial values, order and split of the text.
      learning_rate: the highest; 10 % of the steps warm up to it and a cosine leads to a tenth of it.
      validation_batches: batches of validation text in the final loss.

    Raises:
      ValueError: a count out of its range, a learning rate that is no positive number, an unknown variant or preset.
    """

    preset: str = "tiny"
    variants: tuple[str, ...] = ("bf16", "coat")
    steps: int = 400
    batch: int = 8
    seq: int = 128
    seed: int = 0
    learning_rate: float = 4e-3
    validation_batches: int = 32

    def __post_init__(self):
        for name, (least, most) in RANGES.items():
            check_count(name, getattr(self, name), least, most)
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"compare: learning_rate={self.learning_rate}; use a positive one, as 4e-3")
        if not self.variants or len(set(self.variants)) < len(self.variants):
            raise ValueError(f"compare: variants={','.join(self.variants)!r}; name each variant once, as in bf16,coat")
        for variant in self.variants:
            if variant.removesuffix(FUSED) not in VARIANTS:
                raise ValueError(
                    f"compare: variant {variant!r} is unknown; use some of {', '.join(VARIANTS)}, or one of these + 'fused'"
                )
        llama.preset(self.preset)

    @property
    def model_config(self) -> llama.Config:
        """The preset with bytes as its vocabulary and f32 parameters."""
        return dataclasses.replace(llama.preset(self.preset), vocab_size=data.VOCABULARY)

    @property
    def schedule(self) -> optax.Schedule:
        """step -> learning rate."""
        top, warm_up = self.learning_rate, max(1, self.steps // 10)
        return optax.warmup_cosine_decay_schedule(top / warm_up, top, warm_up, self.steps + 1, top / 10)


def build(settings: StudyConfig, name: str) -> Variant:
    """The variant `name`. Gradients clipped to norm 1; AdamW with b1 0.9, b2 0.95, weight decay 0.1, as Llama was trained."""
    recipe = name.removesuffix(FUSED)
    model = llama.Llama(settings.model_config, recipe=recipes.named(recipe))
    adamw = VARIANTS[recipe](settings.schedule, b1=0.9, b2=0.95, weight_decay=0.1)
    variant = Variant.of_model(name, model, optax.chain(optax.clip_by_global_norm(1.0), adamw))
    if not name.endswith(FUSED):
        return variant
    return dataclasses.replace(variant, fused=fused_step(layered_llama(model), adamw, clip=Clip(1.0)))
