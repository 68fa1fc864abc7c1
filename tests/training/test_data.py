"""Text in, batches out: the split, its determinism, and every way the text can be unusable."""

import errno
import os
import random
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

from comet.jobs.config import DataConfig
from comet.training import data
from comet.training.data import Piece, Text, heldout_windows, read_corpus, sample_batch, split_heldout


def text_in(path, content):
    path.write_bytes(content)
    return Text([Piece(path, 0, len(content))])


def content_of(text):
    return bytes(text[:].tolist())


def test_standard_library_is_the_default_text_and_stable():
    first, second = (read_corpus(DataConfig(), 128) for _ in range(2))
    assert first.digest == second.digest
    assert len(first.train) > 2_000_000
    assert 0.04 < len(first.heldout) / (len(first.train) + len(first.heldout)) <= 0.05
    assert b"def " in bytes(first.heldout[:20_000].tolist())


@pytest.mark.parametrize("seed", range(20))
def test_split_loses_no_byte_and_keeps_to_the_fraction(seed, tmp_path):
    parts = split_heldout({"a": text_in(tmp_path / "a", b"0123456789")}, 0.2)
    assert list(map(content_of, parts)) == [b"01234567", b"89"], "the worked example"
    print("seed", seed)
    rng = random.Random(seed)
    texts = {f"f{index}": rng.randbytes(rng.choice([0, 1, 7, 300])) for index in range(rng.randrange(1, 40))}
    fraction = rng.uniform(0.01, 0.9)
    files = {name: text_in(tmp_path / name, text) for name, text in texts.items()}
    train, heldout = map(content_of, split_heldout(files, fraction))
    total = sum(map(len, texts.values()))
    assert sorted(train + heldout) == sorted(b"".join(texts.values()))
    assert len(heldout) <= fraction * total
    assert len(heldout) >= int(fraction * total) / 2


def test_split_does_not_depend_on_other_files_contents_but_on_names(tmp_path):
    texts = {f"file{index}": text_in(tmp_path / f"{index}", bytes([index]) * 10) for index in range(40)}
    changed = {name: text_in(tmp_path / f"{name}-2", content_of(text)[::-1]) for name, text in texts.items()}
    heldout = split_heldout(texts, 0.25)[1]
    assert len(heldout) == 100
    assert set(content_of(heldout)) == set(content_of(split_heldout(changed, 0.25)[1]))


@pytest.mark.parametrize("seed", range(10))
def test_a_text_in_files_reads_as_one_in_memory(seed, tmp_path, monkeypatch):
    print("seed", seed)
    rng = random.Random(seed)
    monkeypatch.setattr(data, "MOST_OPEN", rng.choice([1, 3, 256]))
    monkeypatch.setattr(data, "CHUNK_BYTES", rng.choice([1, 7, 2**20]))
    contents = [rng.randbytes(rng.choice([0, 1, 5, 100])) for _ in range(12)] + [b"last"]
    text = Text(piece for index, each in enumerate(contents) for piece in text_in(tmp_path / f"{index}", each).pieces)
    whole = b"".join(contents)
    assert (len(text), content_of(text), b"".join(text.chunks())) == (len(whole), whole, whole)
    for _ in range(30):
        start, stop = sorted(rng.randrange(len(whole) + 1) for _ in range(2))
        assert bytes(text[start:stop].tolist()) == whole[start:stop]
        assert content_of(Text(text.cut(start, stop))) == whole[start:stop]
    in_memory = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
    for step in range(5):
        one, other = (
            sample_batch(each, batch_size=4, context=3, seed=seed, step=step, rank=1) for each in (text, in_memory)
        )
        assert torch.equal(one, other)
    one, other = (heldout_windows(each, num_windows=5, context=3) for each in (text, in_memory))
    assert torch.equal(one, other)


def test_a_file_that_became_shorter_is_named(tmp_path):
    text = text_in(tmp_path / "a", b"0123456789")
    (tmp_path / "a").write_bytes(b"01")
    with pytest.raises(ValueError, match=r"data\.path must not change in a run, but .*a has become shorter"):
        text[5:8]


# The version that kept the whole text in memory found these.
DIGESTS = {"one file": "72dcbb0cdc901767", "a folder": "1ef05377c3172b82", "with copies": "1ef05377c3172b82"}


def test_splits_and_digests_are_those_of_checkpoints_that_exist(tmp_path):
    rng = random.Random(7)
    (tmp_path / "one.txt").write_bytes(rng.randbytes(5000))
    (tmp_path / "folder").mkdir()
    for index in range(9):
        (tmp_path / "folder" / f"{index}.txt").write_bytes(rng.randbytes(100 + index))
    found = {"one file": text_of(tmp_path, path="one.txt"), "a folder": text_of(tmp_path, path="folder", fraction=0.3)}
    for index in range(4):
        (tmp_path / "folder" / f"copy{index}.txt").write_bytes((tmp_path / "folder" / f"{index}.txt").read_bytes())
    found["with copies"] = text_of(tmp_path, path="folder", fraction=0.3)
    assert {name: corpus.digest for name, corpus in found.items()} == DIGESTS


LARGE = """
import resource, sys, torch
from comet.jobs.config import DataConfig
from comet.training.data import read_corpus, sample_batch
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
corpus = read_corpus(DataConfig(path=sys.argv[1]), 128)
corpus.digest
for step in range(20):
    sample_batch(corpus.train, batch_size=4, context=128, seed=0, step=step, rank=0)
sys.exit(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before} {len(corpus.train)}")
"""


@pytest.mark.parametrize("num_files", [1, 3])
def test_a_large_text_takes_no_memory(num_files, tmp_path):
    for index in range(num_files):
        with (tmp_path / f"{index}.txt").open("wb") as file:
            file.truncate(2**29 // num_files + index)  # a sparse file
    done = subprocess.run([sys.executable, "-c", LARGE, str(tmp_path)], capture_output=True, text=True)
    kib, length = map(int, done.stderr.split())
    assert length > 2**28
    assert kib * 1024 < 2**26, "of half a gigabyte"


def test_folder_reads_binary_files_and_skips_hidden_ones(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.bin").write_bytes(b"\xff\xfe\x00" * 50)
    (tmp_path / "b.txt").write_bytes(b"b" * 50)
    (tmp_path / ".hidden").write_bytes(b"!" * 500)
    corpus = text_of(tmp_path, fraction=0.2)
    assert len(corpus.train) + len(corpus.heldout) == 200
    assert ord("!") not in content_of(corpus.train) + content_of(corpus.heldout)


def test_links_and_copies_of_a_file_count_once(tmp_path):
    """A cache of Hugging Face links snapshots to blobs: held-out text is no training text."""
    rng = random.Random(0)
    for folder in ("blobs", "snapshots/abc"):
        (tmp_path / folder).mkdir(parents=True)
    for index in range(6):
        (tmp_path / "blobs" / f"{index}").write_bytes(rng.randbytes(100))
    alone = text_of(tmp_path, fraction=0.2)
    digest = alone.digest
    assert alone.source.endswith("(6 files)")
    for index in range(6):
        (tmp_path / "snapshots" / "abc" / f"t{index}.md").symlink_to(f"../../blobs/{index}")
    (tmp_path / "snapshots" / "hard").hardlink_to(tmp_path / "blobs" / "1")
    (tmp_path / "snapshots" / "copy").write_bytes((tmp_path / "blobs" / "2").read_bytes())
    corpus = text_of(tmp_path, fraction=0.2)
    assert corpus.digest == digest
    assert corpus.source.endswith("(6 files; copies left out: 8)")


def text_of(folder, *, path="", fraction=0.05, context=16):
    return read_corpus(DataConfig(path=str(folder / path), heldout_fraction=fraction), context)


@pytest.mark.parametrize(
    ("error", "path", "message"),
    [
        (FileNotFoundError, "nowhere", r"data\.path must be an existing file or folder.*nowhere"),
        (ValueError, "", r"data\.path=.* must hold text, but all its 0 files together hold 0 bytes"),
        (ValueError, "empty", r"must hold text, but all its 1 files together hold 0 bytes"),
        (ValueError, "text", r"of 100 bytes leaves 5 for the held-out part .* more than context=5"),
        (ValueError, "/proc/self/mem", r"data\.path='/proc/self/mem' must be readable, but /proc/self/mem is not"),
    ],
)
def test_text_that_cannot_be_used_is_named_with_the_rule(tmp_path, error, path, message):
    if path:
        (tmp_path / "empty").write_bytes(b"")
        (tmp_path / "text").write_bytes(b"x" * 100)
    with pytest.raises(error, match=message):
        text_of(tmp_path, path=path, context=5)
    assert path != "text" or len(text_of(tmp_path, path=path, context=4).heldout) == 5


def test_text_that_would_be_left_out_is_named(tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(b"abc" * 100)
    (tmp_path / "text" / "b.txt").symlink_to(tmp_path / "text" / "a.txt")
    config = DataConfig(path=str(tmp_path / "text"), heldout_fraction=0.5)
    assert len(read_corpus(config, 8).train) == 150, "of a file and a link to it one"
    for target in (tmp_path, tmp_path / "gone"):
        (tmp_path / "text" / "link").symlink_to(target)
        with pytest.raises(
            ValueError, match=r"data\.path='.*text' must hold no links but to files, unlike .*text/link$"
        ):
            read_corpus(config, 8)
        (tmp_path / "text" / "link").unlink()

    def scandir(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ValueError, match=r"data\.path must be readable, but .*text is not: Permission denied"):
        read_corpus(config, 8)


def test_batches_depend_on_seed_step_and_rank_and_on_nothing_else():
    text = torch.arange(5000).remainder(251).to(torch.uint8)
    size = {"batch_size": 4, "context": 16}
    batch = sample_batch(text, seed=1, step=2, rank=3, **size)
    torch.manual_seed(99)
    assert torch.equal(batch, sample_batch(text, seed=1, step=2, rank=3, **size))
    for other in (
        {"seed": 2, "step": 2, "rank": 3},
        {"seed": 1, "step": 3, "rank": 3},
        {"seed": 1, "step": 2, "rank": 2},
    ):
        assert not torch.equal(batch, sample_batch(text, **other, **size))


def test_batches_are_consecutive_bytes_and_reach_both_ends():
    text = torch.arange(20, dtype=torch.uint8)
    batches = torch.cat([sample_batch(text, batch_size=8, context=16, seed=0, step=s, rank=0) for s in range(20)])
    assert torch.equal(batches - batches[:, :1], torch.arange(17).expand_as(batches))
    assert set(batches[:, 0].tolist()) == {0, 1, 2, 3}


def test_heldout_windows_example_and_bounds():
    windows = heldout_windows(torch.arange(11, dtype=torch.uint8), num_windows=2, context=2)
    assert windows.tolist() == [[0, 1, 2], [8, 9, 10]]
    for length in range(4, 40):
        windows = heldout_windows(torch.arange(length, dtype=torch.uint8), num_windows=5, context=3)
        assert len(windows) == min(5, (length - 1) // 3)
        starts = windows[:, 0].tolist()
        assert all(later - earlier >= 3 for earlier, later in pairwise(starts))
