"""The tensors that experts are stored in."""

from typing import Any

from torch import Tensor


class ExpertParts:
    """w1 and w2 of some experts, an expert a row, and the scales of quantised ones: the base of what holds them."""

    __slots__ = ()
    w1: Tensor  # gate rows first, then up rows
    w2: Tensor  # of the same experts and dtype
    w1_scales: Tensor | None  # None where experts are not quantised, as of w2
    w2_scales: Tensor | None

    @property
    def named_parts(self) -> dict[str, Any]:
        """w1 and w2, and their scales where they have some, by their names."""
        given = {"w1": self.w1, "w2": self.w2, "w1_scales": self.w1_scales, "w2_scales": self.w2_scales}
        return {name: part for name, part in given.items() if part is not None}

    @property
    def stored_parts(self) -> dict[str, Any]:
        """``named_parts``, and the biases b1 and b2 where it has some: what a store keeps; biases take no slot."""
        given = {name: getattr(self, name, None) for name in ("b1", "b2")}
        return self.named_parts | {name: bias for name, bias in given.items() if bias is not None}

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The same without names."""
        return tuple(self.named_parts.values())

    @property
    def expert_bytes(self) -> int:
        """Of one expert, its scales counted."""
        return sum(part[0].nbytes for part in self.parts)
