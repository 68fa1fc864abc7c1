"""The text of a run: a training part, a held-out part, and batches that depend on (seed, step, rank) only.

No state is kept between steps, so a resumed job reads what the first one would have read, and jobs of equal world size
read the same batches whatever their EP and TP.
"""

from __future__ import annotations

import errno
import hashlib
import os
import sysconfig
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from glob import glob
from io import FileIO
from itertools import accumulate, chain
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from comet.config import require
from comet.jobs.config import DataConfig
from comet.models.config import NUM_BYTE_VALUES
from comet.training.tokens import Encoder, Tokens, Vocabulary, open_vocabulary, read_tokens

MAX_STDLIB_BYTES = 16 * 2**20
MOST_OPEN = 256
CHUNK_BYTES = 2**20
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


class Piece(NamedTuple):
    """Consecutive bytes of a file."""

    path: Path
    start: int
    stop: int


class Text:
    """The bytes of pieces of files, one after the other, like a tensor ``(N,)`` of uint8; a slice reads its bytes.

    A text may be larger than memory: no bytes are kept, and the system caches files for all ranks of a host.
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = [piece for piece in pieces if piece.stop > piece.start]
        self._ends = list(accumulate(piece.stop - piece.start for piece in self.pieces))
        self._open = lru_cache(MOST_OPEN)(FileIO)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, place: slice) -> Tensor:
        data = bytearray().join(map(self._read, self.cut(*place.indices(len(self))[:2])))
        return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)

    def cut(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield the pieces from byte ``start`` to byte ``stop`` of the text."""
        index = bisect_right(self._ends, start)
        while start < stop:
            path, _, last = self.pieces[index]
            left = self._ends[index] - start
            first = last - left
            yield Piece(path, first, first + min(left, stop - start))
            start, index = self._ends[index], index + 1

    def chunks(self) -> Iterator[bytes]:
        for start in range(0, len(self), CHUNK_BYTES):
            yield from map(self._read, self.cut(start, min(start + CHUNK_BYTES, len(self))))

    def _read(self, piece: Piece) -> bytes:
        path, start, stop = piece
        try:
            found = os.pread(self._open(path).fileno(), stop - start, start)
        except OSError as error:
            raise ValueError(f"data.path must be readable, but {path} is not: {error.strerror}") from error
        require(len(found) == stop - start, f"data.path must not change in a run, but {path} has become shorter")
        return found


@dataclass(frozen=True)  # without slots, for the digest
class Corpus:
    """The bytes or tokens to learn from and those to be judged by."""

    train: Text | Tokens
    heldout: Text | Tokens
    source: str  # in words
    vocabulary: Vocabulary

    @property
    def starts(self) -> Starts:
        """The function that says where the sequences of a batch begin."""
        return random_starts if self.vocabulary.unit == "byte" else packed_starts

    @cached_property
    def digest(self) -> str:
        return _sha256(self.train, self.heldout)[:16]


def read_corpus(config: DataConfig, context: int, vocab_size: int = NUM_BYTE_VALUES) -> Corpus:
    """Read and split the text; each part must hold a sequence of ``context`` bytes or tokens and the next one.

    With a tokenizer the last tokens of all documents in a fixed random order are held out, else bytes by
    ``split_heldout``.
    """
    vocabulary = open_vocabulary(config, vocab_size)
    root = Path(sysconfig.get_path("stdlib")) if config.path is None else Path(config.path)
    files = _stdlib_files(root) if config.path is None else _files(root)
    source = "the Python standard library" if config.path is None else f"data.path={config.path!r}"
    texts = {name: _text(path, source) for name, path in files.items()}
    if config.path is not None:  # the default text keeps its few small copies, and runs that began with it go on
        texts = _without_copies(texts)
    total = sum(map(len, texts.values()))
    require(total > 0, f"{source} must hold text, but all its {len(files)} files together hold 0 bytes")
    parts: Sequence[Text | Tokens] = split_heldout(texts, config.heldout_fraction)
    if vocabulary.unit == "token":
        encoder = Encoder(vocabulary.tokenizer_json, vocabulary.end_id)
        parts = read_tokens([files[name] for name in texts], encoder, source, config.text_field).split(
            config.heldout_fraction
        )
        total = sum(map(len, parts))
    for part, text in zip(("training", "held-out"), parts, strict=True):
        require(
            len(text) > context,
            f"{source} of {total} {vocabulary.unit}s leaves {len(text)} for the {part} part (heldout_fraction="
            f"{config.heldout_fraction}), which must be more than context={context}",
        )
    copies = len(files) - len(texts)
    told = f"{len(texts)} files" + (f"; copies left out: {copies}" if copies else "")
    return Corpus(parts[0], parts[1], source=f"{source} ({told})", vocabulary=vocabulary)


def _sha256(*texts: Text | Tokens) -> str:
    digest = hashlib.sha256()
    for chunk in chain.from_iterable(text.chunks() for text in texts):
        digest.update(chunk)
    return digest.hexdigest()


def _without_copies(texts: dict[str, Text]) -> dict[str, Text]:
    """The first file of each content: by a link or a copy, text that is held out would be learnt from, too."""
    lengths = Counter(map(len, texts.values()))
    first: dict[tuple[int, str], str] = {}
    for name, text in texts.items():
        is_only = lengths[len(text)] == 1  # Only files of equal length are read to compare them.
        first.setdefault((len(text), "" if is_only else _sha256(text)), name)
    return {name: texts[name] for name in first.values()}


def split_heldout(texts: dict[str, Text], fraction: float) -> tuple[Text, Text]:
    """Hold out whole files where they are small enough, otherwise the tail of all text.

    Files are taken in the order of their names' SHA-256 as long as they fit into ``fraction`` of all bytes. Where that
    gives less than half of it (one file, or a few large ones), the last bytes are held out instead.

    Example: one file of ``0123456789`` with fraction 0.2 gives ``01234567`` and ``89``.
    """
    budget = int(fraction * sum(map(len, texts.values())))
    chosen: set[str] = set()
    used = 0
    for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if used + len(texts[name]) <= budget:
            chosen.add(name)
            used += len(texts[name])
    if 2 * used < budget:
        everything = Text(piece for text in texts.values() for piece in text.pieces)
        middle = len(everything) - budget
        return Text(everything.cut(0, middle)), Text(everything.cut(middle, len(everything)))
    train = (piece for name, text in texts.items() if name not in chosen for piece in text.pieces)
    return Text(train), Text(piece for name, text in texts.items() if name in chosen for piece in text.pieces)


# Returns where ``batch_size`` sequences begin; called with the length of a text and the keywords of ``sample_batch``.
Starts = Callable[..., Tensor]


def random_starts(length: int, *, batch_size: int, context: int, seed: int, step: int, rank: int, ranks: int) -> Tensor:
    return torch.randint(length - context, (batch_size,), generator=_generator(seed, step, rank))


def packed_starts(length: int, *, batch_size: int, context: int, seed: int, step: int, rank: int, ranks: int) -> Tensor:
    """Take the sequences that lie behind one another, each once before any comes again, in an order for each pass."""
    num_sequences = (length - 1) // context
    first = (step * ranks + rank) * batch_size
    numbers = (divmod(number, num_sequences) for number in range(first, first + batch_size))
    return torch.stack([_order(num_sequences, seed, epoch)[number] for epoch, number in numbers]) * context


@lru_cache(2)
def _order(num_sequences: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(num_sequences, generator=_generator(seed, "pass", epoch))


def _generator(*words: object) -> torch.Generator:
    key = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "little", signed=True))


def sample_batch(
    text: Text | Tokens | Tensor,
    *,
    batch_size: int,
    context: int,
    seed: int,
    step: int,
    rank: int,
    ranks: int = 1,
    starts: Starts = random_starts,
) -> Tensor:
    """Return ``(B, S + 1)`` int64, sequences of ``text (N,)`` with their next bytes or tokens; a pure function."""
    where = dict(batch_size=batch_size, context=context, seed=seed, step=step, rank=rank, ranks=ranks)
    return _windows(text, starts(len(text), **where), context)


def heldout_windows(text: Text | Tokens | Tensor, *, num_windows: int, context: int) -> Tensor:
    """Evenly spread sequences of ``text (H,)``, the same for every job.

    Example: 11 bytes, context 2, two windows: they start at 0 and 8, the last place that leaves a next byte.
    """
    num_windows = min(num_windows, (len(text) - 1) // context)
    starts = torch.arange(num_windows) * ((len(text) - 1 - context) // max(num_windows - 1, 1))
    return _windows(text, starts, context)


def _windows(text: Text | Tokens | Tensor, starts: Tensor, context: int) -> Tensor:
    return torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()


def _text(path: Path, source: str) -> Text:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.read(1)  # Some files open and cannot be read.
    except OSError as error:
        raise ValueError(f"{source} must be readable, but {path} is not: {error.strerror}") from error
    return Text([Piece(path, 0, size)])


def _stdlib_files(root: Path) -> dict[str, Path]:
    """Sources of the standard library by relative name, sorted, as many as fit into ``MAX_STDLIB_BYTES``."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    files: dict[str, Path] = {}
    room = MAX_STDLIB_BYTES
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in found):
        size = path.stat().st_size
        if size <= room:
            files[name] = path
            room -= size
    if not files:
        rule = "data.path must be given: this interpreter has no library sources"
        raise FileNotFoundError(errno.ENOENT, rule, str(root))
    return files


def _files(root: Path) -> dict[str, Path]:
    if root.is_file():
        return {root.name: root}
    if not root.exists() and (names := sorted(glob(str(root), recursive=True))):
        return {name: Path(name) for name in names if Path(name).is_file()}
    if not root.is_dir():
        raise FileNotFoundError(
            errno.ENOENT, "data.path must be an existing file or folder, or a pattern of some", str(root)
        )
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root, onerror=_refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [Path(folder, name) for name in [*subfolders, *names] if not name.startswith(".")]
    links = [str(path) for path in found if path.is_symlink() and not path.is_file()]
    require(not links, f"data.path={str(root)!r} must hold no links but to files, unlike {', '.join(sorted(links))}")
    return {path.relative_to(root).as_posix(): path for path in sorted(found) if path.is_file()}


def _refuse(error: OSError) -> NoReturn:
    raise ValueError(f"data.path must be readable, but {error.filename} is not: {error.strerror}") from error
