"""From text to tokens and back, piece by piece: nothing is shown before it is certain.

Bytes that do not yet form a character wait for the rest of it, and what may become the stop text waits until it did or
did not.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from comet.models.config import NUM_BYTE_VALUES

UNFINISHED = "\ufffd"


class ByteCodec:
    """Every byte is a token: what ``comet train`` trains."""

    num_tokens = NUM_BYTE_VALUES  # ids below it are tokens; a model may have more logits
    end_ids: frozenset[int] = frozenset()  # tokens that end a sequence

    def encode(self, text: str) -> list[int]:
        """UTF-8, and the very bytes of a command line that is not."""
        return list(text.encode("utf-8", "surrogateescape"))

    def stream(self, prompt: Sequence[int]) -> ByteStream:
        """A stream for what follows ``prompt``, which may end within a character."""
        stream = ByteStream()
        for byte in prompt:
            stream.push(byte)
        return stream


class ByteStream:
    """UTF-8, with a replacement character for bytes that can form none.

    Example: ``push(0xC3)`` returns ``""``, then ``push(0xA9)`` an e with an acute accent.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The character that is whole now, if any."""
        return self._decoder.decode(bytes([token]))

    def finish(self) -> str:
        """What is left, as replacement characters."""
        return self._decoder.decode(b"", final=True)


class TokenizerCodec:
    """The tokenizer of a Hugging Face folder."""

    def __init__(self, tokenizer: Any, end_ids: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.num_tokens = len(tokenizer)
        self.end_ids = end_ids

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, with those the tokenizer puts in front."""
        return list(self.tokenizer.encode(text))

    def stream(self, prompt: Sequence[int]) -> TokenizerStream:
        """A stream for what follows ``prompt``."""
        return TokenizerStream(self.tokenizer, prompt)


class TokenizerStream:
    """Text of tokens whose pieces depend on their neighbours (a space in front, bytes of one character).

    A window of tokens is decoded with and without the new ones; once the longer text does not end within a character,
    the difference is certain and the window moves on.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._known = list(prompt[-1:])
        self._new: list[int] = []

    def push(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._new.append(token)
        piece = self._piece()
        if not piece or piece.endswith(UNFINISHED):
            return ""
        self._known, self._new = self._new, []
        return piece

    def finish(self) -> str:
        """The rest."""
        piece, self._new = self._piece(), []
        return piece

    def _piece(self) -> str:
        return self._decode(self._known + self._new)[len(self._decode(self._known)) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


Codec = ByteCodec | TokenizerCodec


class Continuation:
    """One sequence as it grows, and when it ends.

    ``stopped_by`` says why it did: ``end token``, ``stop`` (the stop text) or ``length``, the most tokens; "" while it
    grows. End token and stop text are left out.
    """

    def __init__(
        self,
        stream: ByteStream | TokenizerStream,
        *,
        limit: int,
        stop: str | None = None,
        end_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.num_tokens = 0
        self.text = ""
        self.stopped_by = ""
        self._stream = stream
        self._limit = limit
        self._stop = stop
        self._end_ids = end_ids
        self._held = ""

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return bool(self.stopped_by)

    def push(self, token: int) -> str:
        """Add a token; returns the text that is certain now and was not before. Once done, tokens are ignored."""
        if self.done:
            return ""
        self.num_tokens += 1
        ended = token in self._end_ids
        certain = "" if ended else self._release(self._stream.push(token))
        if not self.done and (ended or self.num_tokens == self._limit):
            self.stopped_by = "end token" if ended else "length"
            certain += self._release(self._stream.finish()) + self._held
            self._held = ""
        self.text += certain
        return certain

    def _release(self, piece: str) -> str:
        """What is certain of the held text and ``piece``; ends the sequence at the stop text."""
        text = self._held + piece
        if self._stop is None:
            return text
        place = text.find(self._stop)
        if place >= 0:
            self.stopped_by, self._held = "stop", ""
            return text[:place]
        held = stop_prefix_length(text, self._stop)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def stop_prefix_length(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``stop``; ``("a\\n", "\\n\\n")`` gives 1."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)


def visible(text: str) -> str:
    """Text that cannot command a terminal: control characters but tab and newline become ``\\x1b`` and the like."""
    return "".join(char if char in "\t\n" or char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
