"""The ids of a run: bytes, or tokens of documents that ``datasets`` reads and that lie packed in a mapped file.

``datasets`` keeps what it has read and encoded in its cache, by the content of files and tokenizer, so that only the
first rank of a host, and no later run, encodes a text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from comet.config import require
from comet.jobs.config import DataConfig
from comet.models.config import NUM_BYTE_VALUES

PIECE_CHARACTERS = 2**18  # A tokenizer keeps about 100 bytes a token until it has read a whole text.
KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}  # others are text, one document a file
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
    field: str

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
        for text in filter(None, batch[self.field]):
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


def read_tokens(files: Sequence[Path], encoder: Encoder, source: str) -> Tokens:
    """Read and encode all documents, in an order that depends on nothing else."""
    import datasets
    from datasets import Dataset, Features, List, Value

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    kinds = {KINDS.get(Path(path.name.removesuffix(".gz")).suffix, "text") for path in files}
    rule = "must hold files of one kind, which their names end in: .parquet, .jsonl, or text"
    ways = f"{', '.join(sorted(kinds))}: name those of one kind, as data.path='texts/*.jsonl'"
    require(len(kinds) == 1, f"{source} {rule}, but holds {ways}")
    kind, names = kinds.pop(), list(map(str, files))
    try:
        if kind == "text":
            found = Dataset.from_text(names, sample_by="document")
        elif kind == "json":
            found = Dataset.from_json(names)
        else:
            found = Dataset.from_parquet(names)
    except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:
        cause = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"{source} must hold whole records of {kind}, but reading fails: {cause}") from error
    field, columns = encoder.field, found.features
    is_text = field in columns and columns[field] in (Value("string"), Value("large_string"))
    own = ", ".join(f"{name} ({kind.dtype})" for name, kind in columns.items())
    require(is_text, f"data.text_field={field!r} must be a text field of {source}, which has {own}")
    encoded = found.shuffle(seed=0).map(
        encoder, batched=True, remove_columns=found.column_names, features=Features({"tokens": List(Value("int32"))})
    )
    return Tokens(flat(encoded.data.column("tokens")))


def flat(lists: Any) -> Any:
    """All elements of a ``pyarrow.ChunkedArray`` of lists, which stay where they are."""
    import pyarrow

    return pyarrow.chunked_array([chunk.flatten() for chunk in lists.chunks], type=lists.type.value_type)
