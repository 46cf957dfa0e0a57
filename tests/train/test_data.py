"""Text as bytes: what is read, how it is split, and that a seed decides everything."""

import itertools

import numpy as np
import pytest

from coat_jax.train import data


@pytest.fixture
def folder(tmp_path):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_bytes(bytes([65 + i]) * 1000)
    return tmp_path


def test_training_and_validation_share_no_file_and_lose_none(folder):
    corpus = data.load([folder])
    assert not set(corpus.train_files) & set(corpus.validation_files)
    assert {*corpus.train_files, *corpus.validation_files} == set(folder.iterdir())
    assert not set(corpus.train) & set(corpus.validation)  # every file has its own letter
    assert len(corpus.validation) == 2000 and len(corpus.train) == 18000


def test_copies_of_a_file_do_not_reach_the_other_side(folder):
    for i in range(20):
        (folder / f"copy of {i}.txt").write_bytes(bytes([65 + i]) * 1000)
    corpus = data.load([folder])
    assert not set(corpus.train) & set(corpus.validation)
    assert len(corpus.train) + len(corpus.validation) == 20000


def test_split_depends_on_the_text_and_the_seed_alone(folder, tmp_path_factory):
    moved = tmp_path_factory.mktemp("moved")
    for path in folder.iterdir():
        (moved / f"renamed {path.name}").write_bytes(path.read_bytes())
    here, there, other = data.load([folder], seed=1), data.load([moved], seed=1), data.load([folder], seed=2)
    np.testing.assert_array_equal(here.train, there.train)
    assert not np.array_equal(here.train, other.train)


def test_windows_cover_every_byte_that_has_a_successor():
    windows = data.Windows(np.arange(101, dtype=np.uint8), seq=10)
    assert len(windows) == 10
    rows = np.stack([windows[i] for i in range(10)])
    np.testing.assert_array_equal(rows[:, :-1].ravel(), np.arange(100))
    np.testing.assert_array_equal(rows[:, 1:].ravel(), np.arange(1, 101))


def test_batches_are_shuffled_complete_and_seeded():
    windows = data.Windows(np.arange(81, dtype=np.uint8), seq=10)
    first, again, other = (list(itertools.islice(windows.batches(2, seed), 8)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    starts = [[int(row[0]) for batch in half for row in batch] for half in (first[:4], first[4:])]
    assert sorted(starts[0]) == sorted(starts[1]) == list(range(0, 80, 10))  # each epoch has every window once
    assert starts[0] != starts[1] and starts[0] != sorted(starts[0])
    assert first[0].shape == (2, 11) and first[0].dtype == np.int32


def test_standard_library_is_real_text_without_its_tests():
    files = data.standard_library()
    assert {"argparse.py", "dataclasses.py"} <= {path.name for path in files}
    assert not any({"test", "site-packages"} & set(path.parts[-3:]) for path in files)


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ({}, {}, "data: no file in .*give text files"),
        ({"a": "", "b": ""}, {}, "0 non-empty, different files.*give 2 or more"),
        ({"a": "text", "b": "text"}, {}, "1 non-empty, different files"),
        ({"a": "some", "b": "text"}, {"least_bytes": 100}, "data: 4 bytes for training .* one batch needs 100"),
    ],
)
def test_poor_text_is_refused_in_one_line(tmp_path, files, options, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        data.load([tmp_path], **options)
    assert "\n" not in str(error.value)


def test_missing_path_is_named(tmp_path):
    with pytest.raises(ValueError, match="data: .*nowhere.* does not exist"):
        data.load([tmp_path / "nowhere"])
