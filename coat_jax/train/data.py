"""Text as bytes: files split into training and validation, cut into windows, shuffled and batched with Grain."""

import dataclasses
import hashlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import grain
import numpy as np

VOCABULARY = 256
"""Tokens are bytes."""

_FOREIGN = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


@dataclasses.dataclass(frozen=True)
class Windows:
    """Text as windows of `seq + 1` bytes, neighbours sharing one: `seq` inputs and, one byte later, `seq` targets.

    Attributes:
      text: uint8 (bytes,).
      seq: tokens in a window.
    """

    text: np.ndarray
    seq: int

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1) // self.seq)

    def __getitem__(self, index: int) -> np.ndarray:
        start = int(index) * self.seq
        return self.text[start : start + self.seq + 1].astype(np.int32)

    def batches(self, batch: int, seed: int) -> Iterator[np.ndarray]:
        """Endless batches, int32 (batch, seq + 1): every window once an epoch, each epoch in its own seeded order."""
        dataset = grain.MapDataset.source(self).shuffle(seed=seed).repeat().batch(batch)
        return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0)))


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text for training and for validation, from different files.

    Attributes:
      train: uint8 (bytes,).
      validation: uint8 (bytes,).
      train_files: where `train` was read.
      validation_files: where `validation` was read.
    """

    train: np.ndarray
    validation: np.ndarray
    train_files: tuple[Path, ...]
    validation_files: tuple[Path, ...]


def standard_library() -> list[Path]:
    """The source files of this Python's standard library, a corpus that is on every machine; its own tests left out."""
    root = Path(sysconfig.get_path("stdlib"))
    return [path for path in sorted(root.rglob("*.py")) if not _FOREIGN & set(path.relative_to(root).parts)]


def find_files(paths: Iterable[Path | str]) -> list[Path]:
    """Files under `paths`; folders are searched, hidden files and folders in them left out.

    Raises:
      ValueError: a path that does not exist, or no file at all.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"data: {str(path)!r} does not exist; give text files or folders of them")
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        visible = (p for p in inside if not any(part.startswith(".") for part in p.relative_to(path).parts))
        found += [p for p in visible if p.is_file()]
    if not found:
        raise ValueError(f"data: no file in {', '.join(map(str, paths))}; give text files or folders of them")
    return found


def load(paths: Sequence[Path | str] = (), *, seed: int = 0, validation_share: float = 0.1, least_bytes: int = 2) -> Corpus:
    """Reads text and splits it by file: whole files go to validation until they hold `validation_share` of the bytes.

    A file whose content was read before is dropped, so that no text is on both sides.

    Args:
      paths: text files or folders; none is the standard library's source.
      seed: order of the files, and so which are for validation.
      validation_share: share of the bytes kept for validation, above 0 and below 1.
      least_bytes: bytes that each side must have, such as one batch.

    Raises:
      ValueError: a path that does not exist, no text, a single file, or fewer bytes than `least_bytes` on a side.

    Example:
      >>> from coat_jax.train import data
      >>> corpus = data.load(seed=0)
      >>> set(corpus.train_files) & set(corpus.validation_files)
      set()
    """
    texts: dict[bytes, tuple[Path, np.ndarray]] = {}
    for path in find_files(paths) if paths else standard_library():
        content = path.read_bytes()
        if content:
            texts.setdefault(hashlib.sha256(content).digest(), (path, np.frombuffer(content, np.uint8)))
    source = ", ".join(map(str, paths)) or "the standard library"
    if len(texts) < 2:
        raise ValueError(
            f"data: {source} has {len(texts)} non-empty, different files; training and validation need one each, give 2 or more"
        )
    # Sorted by content, then shuffled: the split depends on the text and the seed, not on where the files lie.
    rows = [texts[key] for key in sorted(texts)]
    rows = [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]
    sizes = np.cumsum([len(text) for _, text in rows])
    cut = int(np.searchsorted(sizes, validation_share * sizes[-1])) + 1
    sides = rows[min(cut, len(rows) - 1) :], rows[: min(cut, len(rows) - 1)]
    train, validation = (np.concatenate([text for _, text in side]) for side in sides)
    for name, text in (("training", train), ("validation", validation)):
        if len(text) < least_bytes:
            raise ValueError(f"data: {len(text)} bytes for {name} in {source}; one batch needs {least_bytes}, give more text")
    return Corpus(train, validation, *(tuple(path for path, _ in side) for side in sides))
