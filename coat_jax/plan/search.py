"""Which settings to plan: the frontier around one, and the largest batch that fits."""

from collections.abc import Callable

from coat_jax.models.plain import Remat
from coat_jax.plan.config import Baseline, PlanConfig
from coat_jax.plan.row import PlanRow

_LARGEST = 4096  # sequences per GPU; a search that comes this far stops


def baselines(setting: PlanConfig) -> list[PlanConfig]:
    """What everyone has: plain BF16 with `optax.adamw`, under the usual policy, under full remat, and that with FP8 moments."""
    plain = setting.replace(recipe=str(Baseline.PLAIN), codec=str(Baseline.OPTAX), remat=str(Remat.NONE), fused=False)
    full = plain.replace(remat=str(Remat.LAYER))
    return [plain, plain.replace(remat=str(Remat.DOTS)), full, full.replace(codec="coat")]


def ours(setting: PlanConfig) -> list[PlanConfig]:
    """This library's: the paper's recipe, the lean one, and both updated inside the backward pass."""
    codec = "coat" if setting.codec == Baseline.OPTAX else setting.codec
    start = setting.replace(codec=codec, remat=str(Remat.NONE), fused=False)
    rows = [start.replace(recipe=recipe) for recipe in ("coat", "lean")]
    return rows + [row.replace(fused=True) for row in rows]


def frontier(setting: PlanConfig) -> list[PlanConfig]:
    """One setting for each combination worth comparing on the same model, GPUs, batch and sequence; `setting` is among them."""
    found = baselines(setting) + ours(setting)
    return found if setting in found else [setting, *found]


def largest_batch(row: PlanRow, plan: Callable[[PlanConfig], PlanRow], reserve_bytes: int) -> int:
    """Sequences over all GPUs of the largest step that fits, or 0.

    The compiled peak grows almost linearly with the batch, so the search steps along the line through what is known and
    ends with a batch that was compiled and fits while the next one was compiled and does not.

    Args:
      row: the setting to start from, planned.
      plan: compiles another.
      reserve_bytes: to be left free.
    """
    gpus = row.setting.gpus
    known = {row.setting.batch // gpus: row}
    fits, too_large = 0, _LARGEST + 1
    guess = row.setting.batch // gpus
    while True:
        if guess not in known:
            known[guess] = plan(row.setting.replace(batch=guess * gpus))
        if known[guess].fits(reserve_bytes):
            fits = max(fits, guess)
        else:
            too_large = min(too_large, guess)
        if too_large - fits <= 1:
            return fits * gpus
        guess = min(max(_along_the_line(known, reserve_bytes), fits + 1), too_large - 1)


def _along_the_line(known: dict[int, PlanRow], reserve_bytes: int) -> int:
    """The batch per GPU at which the line through the two largest known ones meets the memory; twice the only known one."""
    planned = sorted(batch for batch, row in known.items() if row.error is None)
    if len(planned) < 2:
        return 2 * max(known)
    a, b = planned[-2:]
    slope = (known[b].peak_bytes - known[a].peak_bytes) / (b - a)
    room = known[a].memory_bytes - reserve_bytes - known[a].peak_bytes
    return a + int(room // slope) if slope > 0 else 2 * b
