"""The ids of a run: bytes, or tokens of documents, which lie packed in a mapped file.

A document is a record of JSONL, a row of parquet, or the whole of any other file.
``datasets`` keeps what it has read and encoded in its cache, by names, sizes and times of files and by tokenizer, so
that only the first rank of a host, and no later run, encodes a text.
"""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from comet.config import require
from comet.jobs.config import DataConfig
from comet.models.config import NUM_BYTE_VALUES

PIECE_CHARACTERS = 2**18  # A tokenizer keeps about 100 bytes a token until it has read a whole text.
Kind = Literal["json", "parquet", "text"]
KINDS: Mapping[str, Kind] = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}
COMPRESSED = ".gz"
PACKAGES = ("datasets", "transformers")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The ids that a text is made of."""

    unit: Literal["byte", "token"] = "byte"
    num_ids: int = NUM_BYTE_VALUES  # ids below it have a meaning; a model may have more logits
    decode: Callable[[Sequence[int]], bytes] = bytes
    tokenizer_json: str = ""  # content of a file tokenizer.json
    end_token: str | None = None  # follows each document
    end_id: int = -1


def open_vocabulary(config: DataConfig, vocab_size: int) -> Vocabulary:
    """Open the tokenizer of ``data.tokenizer``, whose tokens must fit a model of ``vocab_size`` ids."""
    if config.tokenizer is None:
        idle = config.end_token is not None or config.text_field != DataConfig().text_field
        require(
            not idle, "data.end_token and data.text_field must come with data.tokenizer: bytes are read as they are"
        )
        return Vocabulary()
    given, missing = f"data.tokenizer={config.tokenizer!r}", [name for name in PACKAGES if find_spec(name) is None]
    install = "leave it out, or pip install 'comet-moe[text]'"
    require(not missing, f"{given} must come with the packages {' and '.join(PACKAGES)}: {install}")
    from comet.integrations.hf.settings import open_tokenizer

    tokenizer = open_tokenizer("data.tokenizer", Path(config.tokenizer), config.end_token)
    require(tokenizer.is_fast, f"{given} must be one that can be saved as tokenizer.json")
    ids, end = tokenizer.get_vocab(), config.end_token or tokenizer.eos_token
    require(end is not None, f"{given} names no end token: data.end_token must be given, as '<|endoftext|>'")
    require(end in ids, f"data.end_token={end!r} must be a token of {given}")
    most = max(ids.values()) + 1
    rule = f"must be at least the {most} ids of {given}"
    require(most <= vocab_size, f"model.vocab_size={vocab_size} {rule}: give model.vocab_size={-(-most // 64) * 64}")
    return Vocabulary(
        "token", most, lambda ids: tokenizer.decode(ids).encode(), tokenizer.backend_tokenizer.to_str(), end, ids[end]
    )


def kind_of(files: Iterable[Path], source: str) -> Kind:
    """Return what all files hold, as their names end; ``.gz`` behind that is a compressed file."""
    kinds = {KINDS.get(Path(path.name.lower().removesuffix(COMPRESSED)).suffix, "text") for path in files}
    rule = "must hold files of one kind, which their names end in: .parquet, .jsonl, or text"
    ways = f"{', '.join(sorted(kinds))}: name those of one kind, as data.path='texts/*.jsonl'"
    require(len(kinds) == 1, f"{source} {rule}, but holds {ways}")
    return kinds.pop()


@dataclass(frozen=True)  # without slots: ``datasets`` knows by the fields what it has read before
class Documents:
    """The documents of files, and an empty one behind them, for ``Dataset.from_generator``, which refuses none."""

    files: tuple[Path, ...]
    kind: Kind
    field: str  # Name of the text in a record or row.
    source: str  # in words
    stamps: tuple[tuple[int, int], ...]  # bytes of every file, and when it was changed

    @classmethod
    def of(cls, files: Sequence[Path], field: str, source: str) -> Documents:
        found = [path.stat() for path in files]
        stamps = tuple((each.st_size, each.st_mtime_ns) for each in found)
        return cls(tuple(path.absolute() for path in files), kind_of(files, source), field, source, stamps)

    def __call__(self) -> Iterator[dict[str, str]]:
        yield from ({"text": text} for path in self.files for text in self._read(path))
        yield {"text": ""}

    def _read(self, path: Path) -> Iterator[str]:
        """Yield the documents of a file; raise ``ValueError`` that names the record that is none."""
        from pyarrow import ArrowException

        done, opened = 0, gzip.open if path.name.lower().endswith(COMPRESSED) else open
        try:
            with opened(path, "rb") as file:
                for place, record in _records(self.kind, file, self.field):
                    text = self._text(record, f"{place} of {path}")
                    text.encode()  # Escapes of JSON may stand for halves of characters.
                    yield text
                    done += 1
        except (OSError, EOFError, zlib.error, UnicodeError, json.JSONDecodeError, RecursionError, ArrowException) as e:
            where = f"must hold whole records of {self.kind}, but reading {path} fails after {done} of them"
            raise ValueError(f"{self.source} {where}: {' '.join(str(e).split())}") from e

    def _text(self, record: Any, place: str) -> str:
        """The text of a record; empty for ``null``."""
        if self.kind == "text":
            return str(record)
        names = record if isinstance(record, dict) else {}
        value = names.get(self.field, 0)
        own = ", ".join(f"{name} ({type(each).__name__})" for name, each in names.items()) or f"{record!r:.40}"
        rule = f"must be a text field of {self.source}, but {place} has {own}"
        require(value is None or isinstance(value, str), f"data.text_field={self.field!r} {rule}")
        return value or ""


def _records(kind: Kind, file: Any, field: str) -> Iterator[tuple[str, Any]]:
    """Yield where each record of an open file is, and the record."""
    if kind == "parquet":
        from pyarrow.parquet import ParquetFile

        table = ParquetFile(file)
        columns = [field] if field in table.schema_arrow.names else None
        rows = (row for batch in table.iter_batches(columns=columns) for row in batch.to_pylist())
        yield from ((f"row {number}", row) for number, row in enumerate(rows, start=1))
        return
    lines = TextIOWrapper(file, encoding="utf-8-sig")
    if kind == "text":
        yield "the whole", lines.read()
        return
    for number, line in enumerate(lines, start=1):
        if number == 1 and line.lstrip().startswith("["):  # an array of records, not one in each line
            array = json.loads(line + lines.read())
            yield from ((f"record {place}", record) for place, record in enumerate(array, start=1))
        elif line.strip():
            yield f"line {number}", json.loads(line)


class Tokens:
    """Documents behind one another, each before its end token, like a tensor ``(N,)`` of int32; a slice is read."""

    def __init__(self, values: Any) -> None:
        self.values = values  # a ``pyarrow.ChunkedArray``

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, place: slice) -> Tensor:
        return torch.tensor(self.values[place].to_numpy())

    def split(self, fraction: float) -> tuple[Tokens, Tokens]:
        """Cut off the last tokens, a share of all."""
        middle = len(self) - int(fraction * len(self))
        return Tokens(self.values[:middle]), Tokens(self.values[middle:])

    def chunks(self) -> Iterator[bytes]:
        for chunk in self.values.chunks:
            yield chunk.to_numpy().tobytes()


@dataclass(frozen=True)  # ``datasets`` knows by the fields what it has encoded before
class Encoder:
    """Encodes batches of documents for ``Dataset.map``; empty ones are left out."""

    tokenizer_json: str
    end_id: int

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, which cuts off and fills up nothing."""
        from tokenizers import Tokenizer

        found = Tokenizer.from_str(self.tokenizer_json)
        found.no_truncation()
        found.no_padding()
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in self.__dataclass_fields__}

    def __call__(self, batch: Mapping[str, Sequence[str]]) -> dict[str, list[list[int]]]:
        found = []
        for text in filter(None, batch["text"]):
            encoded = self.tokenizer.encode_batch(pieces(text), add_special_tokens=False)
            found.append([token for piece in encoded for token in piece.ids] + [self.end_id])
        return {"tokens": found}


def pieces(text: str) -> list[str]:
    """Cut a long text behind ends of lines; ``"".join`` undoes it."""
    found, start = [], 0
    while start < len(text):
        stop = text.find("\n", start + PIECE_CHARACTERS) + 1 or len(text)
        found.append(text[start:stop])
        start = stop
    return found


def read_tokens(files: Sequence[Path], encoder: Encoder, source: str, field: str) -> Tokens:
    """Read and encode all documents, in an order that depends on nothing else."""
    import datasets
    from datasets import Dataset, Features, List, Value

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    documents, tokens = Documents.of(files, field, source), Features({"tokens": List(Value("int32"))})
    try:
        found: Any = Dataset.from_generator(documents, features=Features({"text": Value("large_string")}))
        encoded = found.shuffle(seed=0).map(encoder, batched=True, remove_columns=found.column_names, features=tokens)
    except (datasets.exceptions.DatasetGenerationError, OSError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, ValueError):
            raise cause from error
        cache = f"{datasets.config.HF_DATASETS_CACHE}, the folder of datasets, must be one that can be written to"
        raise ValueError(f"{cache}, with room: {cause}; HF_HOME may name another") from error
    return Tokens(flat(encoded.data.column("tokens")))


def flat(lists: Any) -> Any:
    """All elements of a ``pyarrow.ChunkedArray`` of lists, which stay where they are."""
    import pyarrow

    return pyarrow.chunked_array([chunk.flatten() for chunk in lists.chunks], type=lists.type.value_type)
