"""No dispatch and no combine: one rank owns all experts."""

from __future__ import annotations

from torch import Tensor

from comet.config import MoEConfig, require
from comet.layer.group import ExpertGroup
from comet.modular.base import resolve
from comet.modular.interfaces import ActivationFormat, ContiguousRows, Received, Receiver, RoutedTokens, TopKReduce
from comet.quantization.formats import quantize_rows
from comet.utils.match import check_id_range


class SingleRank:
    """Hands the tokens on as they are. EP = TP = 1 only; any number of tokens; masked slots."""

    activation_format = ActivationFormat.CONTIGUOUS
    carries_fp8 = True
    uses_collectives = False

    def __init__(self, config: MoEConfig, group: ExpertGroup) -> None:
        self.comm = group.comm
        self.layout = group.layout(config)
        size = self.layout.world_size
        require(size == 1, f"ep x tp = {size} of the group must be 1: SingleRank sends nothing to other ranks")
        require_dropless(config, "SingleRank")

    def prepare(self, routed: RoutedTokens, *, quantize: bool) -> Received:
        """The tokens as contiguous rows.

        Raises:
            ValueError: On a CPU, if an id is out of range, or a token that is quantised is not finite; on a GPU, where
                looking would wait for the device, both are trusted, as a router and a layer made them.
        """
        on_cpu = routed.tokens.device.type == "cpu"
        if on_cpu:
            check_id_range(routed.top_k_ids, self.layout.num_experts)
        tokens = quantize_rows(routed.tokens, trusted=not on_cpu) if quantize else routed.tokens.contiguous()
        ids, weights = routed.top_k_ids.contiguous(), routed.top_k_weights.contiguous()
        return Received(rows=ContiguousRows(tokens=tokens, top_k_ids=ids, top_k_weights=weights), route=None)

    def prepare_no_receive(self, routed: RoutedTokens, *, quantize: bool) -> Receiver:
        """Nothing travels: all is done when it returns."""
        received = self.prepare(routed, quantize=quantize)
        return lambda: received

    def finalize(self, outputs: Tensor, received: Received, reduce: TopKReduce) -> Tensor:
        """Reduce; nothing is sent."""
        return resolve(reduce, received.rows).apply(outputs, received.rows)


def require_dropless(config: MoEConfig, name: str) -> None:
    """Raise ``ValueError`` if the configuration lets experts drop rows."""
    require(
        config.capacity_factor is None,
        f"capacity_factor={config.capacity_factor} must be None: {name} is dropless",
    )
