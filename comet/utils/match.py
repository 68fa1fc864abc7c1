"""Shapes in letters: a size is bound where its letter first occurs, and compared wherever the letter comes back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

OUTER = "..."


class Sizes:
    """The sizes of one call or one layer, by letter.

    A specification names the sizes of a tensor in order, such as ``e 2F D``; ``2F/128`` is rounded up. It may begin
    with ``...``, any number of sizes that are bound and compared as one.

    Example: a new ``Sizes`` that matches w2 ``(4, 256, 320)`` with ``e D F`` binds e=4, D=256 and F=320. Then
    ``e 2F D`` takes a w1 of ``(4, 640, 256)`` only, and ``e D/128 F/128`` takes scales ``(4, 2, 3)`` only.
    """

    def __init__(self, **known: tuple[int, str]) -> None:
        self.values: dict[str, int] = {letter: value for letter, (value, _) in known.items()}
        self.origins = {letter: origin for letter, (_, origin) in known.items()}
        self.outer: tuple[int, ...] | None = None

    def match(
        self,
        name: str,
        tensor: Tensor,
        spec: str,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        contiguous: bool = False,
    ) -> None:
        """Compare a tensor with what is known, and bind the letters that are new.

        Args:
            spec: A size per dimension. A letter occurs with a divisor only after it occurred without.
            contiguous: Whether kernels find the elements by address, so that they have to lie in order without gaps.
        """
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} of type {type(tensor).__name__} must be a tensor: dequantize() it for this call")
        if dtype is not None and tensor.dtype != dtype:
            raise ValueError(f"{name} of dtype {tensor.dtype} must be {dtype}")
        if device is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, must be on {device}")
        terms, shape = _terms(spec), tuple(tensor.shape)
        new = self._new_letters(terms, shape)
        if new is None:
            raise ValueError(self._message(name, shape, terms))
        if new:
            self.values.update(new)
            self.origins.update(dict.fromkeys(new, name))
        if contiguous and not tensor.is_contiguous():
            raise ValueError(f"{name} of shape {shape} must be contiguous, has strides {tensor.stride()}")

    def _new_letters(self, terms: tuple[_Term, ...], shape: tuple[int, ...]) -> dict[str, int] | None:
        """Return the letters that a shape binds first; ``None`` if it does not fit those that are bound."""
        if terms[0].letter == OUTER:
            terms = terms[1:]
            outer, shape = shape[: -len(terms)], shape[-len(terms) :]
            self.outer = outer if self.outer is None else self.outer
            if outer != self.outer:
                return None
        if len(terms) != len(shape):
            return None
        new: dict[str, int] = {}
        for (letter, factor, divisor), size in zip(terms, shape, strict=True):
            value = self.values.get(letter)
            if value is None:
                assert divisor == 1, f"the first occurrence of {letter} cannot be divided by {divisor}"
                value = new.setdefault(letter, size // factor)
            if -(-value * factor // divisor) != size:
                return None
        return new

    def _message(self, name: str, shape: tuple[int, ...], terms: tuple[_Term, ...]) -> str:
        wanted: list[str] = []
        whose: dict[str, dict[str, int]] = {}
        for term in terms:
            value = self.values.get(term.letter)
            if term.letter == OUTER:
                wanted += map(str, self.outer or ())
            elif value is None:
                wanted.append(str(term))
            else:
                wanted.append(str(-(-value * term.factor // term.divisor)))
                whose.setdefault(self.origins[term.letter], {})[term.letter] = value
        spec = ", ".join(map(str, terms))
        known = [
            ", ".join(f"{letter}={value}" for letter, value in values.items()) + f" of {origin}"
            for origin, values in whose.items()
        ]
        exactly = f" = ({', '.join(wanted)})" if wanted != [str(term) for term in terms] else ""
        exactly += f" with {', '.join(known)}" if known else ""
        return f"{name} of shape {shape} must be ({spec}){exactly}"


class MatchOnce:
    """A check of tensors that runs only where shape, dtype, device or contiguity differ from those of the last call.

    It keeps no tensor alive, and weights that are cast again for every call are not checked again.
    """

    def __init__(self, check: Callable[..., None]) -> None:
        self._check = check
        self._right: object = None

    def __call__(self, *tensors: Tensor | None, **others: Any) -> None:
        """Check the tensors and the others, unless the tensors, which decide, are like the last ones that passed."""
        try:
            seen = [each is None or (each.shape, each.dtype, each.device, each.is_contiguous()) for each in tensors]
        except AttributeError:  # The check names the one that is no tensor.
            self._right = seen = None
        if seen is None or seen != self._right:
            self._check(*tensors, **others)
            self._right = seen


def check_id_dtype(top_k_ids: Tensor) -> None:
    if top_k_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"top_k_ids of dtype {top_k_ids.dtype} must be torch.int32 or torch.int64")


def check_id_range(top_k_ids: Tensor, num_experts: int) -> None:
    """Raise ``ValueError`` naming the first id that is neither -1 nor an expert; waits for the device."""
    bad = (top_k_ids < -1) | (top_k_ids >= num_experts)
    if bool(bad.any()):
        first = int(top_k_ids[bad][0])
        raise ValueError(
            f"top_k_ids contain {first}; every id must be -1 (masked) or in [0, num_experts={num_experts})"
        )


class _Term(NamedTuple):
    letter: str
    factor: int
    divisor: int

    def __str__(self) -> str:
        factor = "" if self.factor == 1 else str(self.factor)
        return f"{factor}{self.letter}" + ("" if self.divisor == 1 else f"/{self.divisor}")


@functools.cache
def _terms(spec: str) -> tuple[_Term, ...]:
    """``_terms("e 2F/128")`` is ``(("e", 1, 1), ("F", 2, 128))``."""
    terms = []
    for text in spec.split():
        product, _, divisor = text.partition("/")
        letter = product.lstrip("0123456789")
        terms.append(_Term(letter, int(product.removesuffix(letter) or 1), int(divisor or 1)))
    return tuple(terms)
