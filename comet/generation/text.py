"""Text to tokens and back, piece by piece: nothing is shown before it is certain; and the view of a person.

Bytes that do not yet form a character wait for the rest of it, and what may become the stop text waits until it did or
did not.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from comet.config import require
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
        """Return a stream for what follows ``prompt``, which may end within a character."""
        stream = ByteStream()
        for byte in prompt:
            stream.push(byte)
        return stream


class ByteStream:
    """UTF-8, with a replacement character for bytes that can form none.

    Example: ``push(0xC3)`` returns ``""``, then ``push(0xA9)`` an e with an acute accent.
    """

    def __init__(self, encoding: str = "utf-8", errors: str = "replace") -> None:
        self._decoder = codecs.getincrementaldecoder(encoding)(errors)

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class TokenizerCodec:
    """The tokenizer of a Hugging Face folder."""

    def __init__(self, tokenizer: Any, end_ids: frozenset[int], vocab_size: int) -> None:
        self.tokenizer = tokenizer
        # Not the number of tokens: their ids may have gaps. Nor are there logits of those that the model does not know.
        self.num_tokens = min(max(tokenizer.get_vocab().values()) + 1, vocab_size)
        self.end_ids = end_ids

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, with those the tokenizer puts in front."""
        ids: list[int] = list(self.tokenizer.encode(text))
        others = [token for token in ids if token >= self.num_tokens]
        known = f"must be tokens below {self.num_tokens}, which are all that the model knows"
        require(not others, f"generate.prompt={text!r} {known}, but holds {others}")
        return ids

    def stream(self, prompt: Sequence[int]) -> TokenizerStream:
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
        """The part of the held text and ``piece`` that is certain; ends the sequence at the stop text."""
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
    return "".join(
        char if char in "\t\n" or char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text
    )


class Printer:
    """Writes the texts one after the other: the first unfinished one as it is made, the others in their turn."""

    def __init__(self, prompts: Sequence[str], out: TextIO) -> None:
        self._prompts = prompts
        self._out = out
        self._waiting = [""] * len(prompts)
        self._done = [False] * len(prompts)
        self._turn = -1
        self._next()

    def __call__(self, index: int, sequence: Continuation, text: str) -> None:
        """Show new text of one sequence; see ``comet.generation.generate.Show``."""
        self._waiting[index] += text
        self._done[index] = sequence.done
        while self._turn < len(self._prompts):
            self._write(self._waiting[self._turn])
            self._waiting[self._turn] = ""
            if not self._done[self._turn]:
                break
            self._write("\n")
            self._next()

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the table and, as the last line, the result as one JSON object."""
        self._write(f"----\n{table(result)}\n{json.dumps(result)}\n")

    def _next(self) -> None:
        self._turn += 1
        if self._turn < len(self._prompts):
            self._write(("\n" if self._turn else "") + self._prompts[self._turn])

    def _write(self, text: str) -> None:
        encoding = self._out.encoding or "utf-8"
        self._out.write(visible(text).encode(encoding, "backslashreplace").decode(encoding))
        self._out.flush()


def context_note(stopped_by: Sequence[str], context: int) -> str:
    """A line for people about texts that had to end before they were as long as was asked for; "" if none had to."""
    cut = [str(number) for number, reason in enumerate(stopped_by, 1) if reason == "context"]
    if not cut:
        return ""
    which = f"{'text' if len(cut) == 1 else 'texts'} {', '.join(cut)} of {len(stopped_by)}"
    return f"comet: {which} ended at the model's context of {context} tokens, prompt included\n"


def table(result: Mapping[str, Any]) -> str:
    """The measurements of a result, one per line; what was not measured is left out."""
    rows = [
        ("prompt", f"{result['prompt_tokens']:,} tokens"),
        ("new", f"{result['new_tokens']:,} tokens"),
        ("first token", f"{1e3 * result['time_to_first_token_s']:,.1f} ms"),
    ]
    if result["tokens_per_second"] is not None:
        launched = f"without a CUDA graph ({result['graph_fallback_reason'] or 'on another rank'})"
        launched = "each step replayed from a CUDA graph" if result["cuda_graph"] else launched
        rows.append(("decode", f"{result['tokens_per_second']:,.1f} tokens/s, {launched}"))
    if cache := result.get("expert_cache"):
        rows.append(("expert hits", f"{cache['hits']:.3f}"))
    drafts = result.get("speculation")
    if drafts and drafts["drafted"]:
        rows.append(
            (
                "drafts",
                f"{drafts['acceptance']:.1%} of {drafts['drafted']:,} accepted, "
                f"{drafts['tokens_per_round']:.2f} tokens per round of a sequence",
            )
        )
    return "\n".join(f"{name:<14}{value}" for name, value in rows)
