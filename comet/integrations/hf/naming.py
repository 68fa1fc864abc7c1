"""The places of a folder's tensors in a model, by the renamings and conversions that transformers has for it.

Published checkpoints hold three matrices per expert (``experts.7.gate_proj.weight``, Mixtral: ``w1``, ``w3``, ``w2``),
others one tensor per layer for all experts (``experts.gate_up_proj``, Granite: ``input_linear``).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from comet.config import require
from comet.integrations.hf.stored import BIASES, FUSED, SCALES, StoredTensor

_SUFFIXES = re.compile(
    f"(_blocks|_scales|{SCALES})$"
)  # These end the names of parts of a tensor in MXFP4 or block FP8.
_NUMBER = re.compile(r"\.experts\.(\d+)\.")
# transformers stacks the matrices of experts by these operations, which leave their order in memory.
_STACKS = ("MergeModulelist", "Concatenate")
# The content of a tensor: gate, up or down of one expert, or (expert None) gate_up_proj, down_proj or a bias of all.
Part = tuple[str, int | None]
Tensors = dict[str, StoredTensor]


class Destination(NamedTuple):
    """The place of a tensor in a model."""

    target: str  # its name in the model
    experts: str | None  # the module of experts that it is of
    part: Part | None  # what it holds of them; None: nothing that is known


class Naming:
    """The names of a model's tensors in its folders; ``stock`` has experts modules of these names."""

    def __init__(self, stock: Any, experts: tuple[str, ...]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        rules = get_model_conversion_mapping(stock)
        self._renamings = [each for each in rules if isinstance(each, WeightRenaming)]
        self._converters = [each for each in rules if isinstance(each, WeightConverter)]
        self._tensors, self._prefix, self._experts = stock.state_dict(), stock.base_model_prefix, experts

    def destination(self, name: str) -> Destination | None:
        """Return the place of the tensor with a stored name, or of a part of it; ``None``: the model has none."""
        from transformers.core_model_loading import rename_source_key

        whole = _SUFFIXES.sub("", name)
        target, pattern = rename_source_key(whole, self._renamings, self._converters, self._prefix, self._tensors)
        ends = (found.start() for found in re.finditer(r"\.|$", target))
        experts = next((target[:end] for end in ends if target[:end] in self._experts), None)
        if experts is None:
            return Destination(target, None, None) if target in self._tensors else None
        if whole != name:  # Scales that nothing took, or codes that lack scales, hold no part.
            return Destination(target, experts, None)
        leaf = target.removeprefix(f"{experts}.")
        part = (leaf, None) if leaf in FUSED + BIASES else None
        return Destination(target, experts, part if pattern is None else self._part(name, leaf, pattern))

    def _part(self, name: str, leaf: str, pattern: str) -> Part | None:
        """Return the content of one expert's tensor, by its place among those that transformers stacks."""
        rule = next(each for each in self._converters if pattern in each.source_patterns)
        others = [type(each).__name__ for each in rule.operations if type(each).__name__ not in _STACKS]
        require(not others, f"{name} must be stored as the model holds it: transformers applies {', '.join(others)}")
        number, kinds = _NUMBER.search(name), ("gate", "up") if leaf == FUSED[0] else ("down",)
        return (kinds[rule.source_patterns.index(pattern)], int(number[1])) if number else None
