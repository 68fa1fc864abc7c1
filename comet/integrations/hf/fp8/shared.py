"""A shared expert in block FP8 within the decode steps of experts in block FP8: pieces read beside the routed ones.

The shared expert's own module is dequantised, and computes all that is no decode step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from comet.decode import DecodeWeights, SharedSlots, held_pieces, joins_step
from comet.decode.runners import Runner
from comet.decode.shared import with_room
from comet.integrations.hf.checkpoint import ALL, LazyShard, Piece
from comet.integrations.hf.experts import CometExperts, is_plain, projections, shared_matrices
from comet.integrations.hf.fp8.blocks import as_stored
from comet.integrations.hf.fp8.experts import FP8Experts
from comet.integrations.hf.stored import SCALES, StoredTensor
from comet.layout import ExpertLayout
from comet.quantization.formats import FP8_BLOCK

NAMES = ("gate_up_proj", "down_proj", f"gate_up_proj{SCALES}", f"down_proj{SCALES}")


class FP8JoinedExperts(FP8Experts):
    """``FP8Experts`` whose decode steps include the block's shared expert.

    ``pieces`` holds this rank's of it, under the names of the routed experts' parameters, if there are any.

    Args:
        width: F/TP, a multiple of 128 and the width of a piece.
    """

    def __init__(
        self,
        hidden_size: int,
        width: int,
        layout: ExpertLayout,
        runner: Runner,
        device: torch.device,
        num_pieces: int,
    ) -> None:
        super().__init__(hidden_size, width, layout, runner, device)
        self.pieces = nn.Module()
        for name in NAMES if num_pieces else ():
            like = self.get_parameter(name)
            room = torch.empty(num_pieces, *like.shape[1:], dtype=like.dtype, device=device)
            self.pieces.register_parameter(name, nn.Parameter(room, requires_grad=False))

    def join(self, shared: nn.Module, gate: nn.Module | None, columns: int) -> None:
        """Let decode steps include the shared expert, where it is one of plain linear layers."""
        if columns and all(map(is_plain, projections(shared))):
            self.shared = FP8SharedSlots(self.layout, columns, shared, self)
            self._gates = () if gate is None else (gate,)

    @torch.compiler.disable
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``(T, D)``: decode steps as those of ``CometExperts``, others as those of ``FP8Experts``."""
        joins = self.shared is not None and joins_step(hidden_states, self.runner.decode.max_tokens)
        compute = CometExperts.forward if joins else FP8Experts.forward
        return compute(self, hidden_states, top_k_index, top_k_weights)

    def join_weights(self, slots: Tensor) -> DecodeWeights:
        """What a step reads: routed experts, then pieces, each parameter in one tensor of which both become views."""
        self._decoded = None  # it holds on to what moves here
        w1, w2, w1_scales, w2_scales = map(self._join_rows, NAMES)
        return DecodeWeights(w1=w1, w2=w2, slots=slots, w1_scales=w1_scales, w2_scales=w2_scales)

    def _join_rows(self, name: str) -> Tensor:
        own, pieces = self.get_parameter(name), dict(self.pieces.named_parameters())
        if not pieces:
            return own.data
        count, held = own.shape[0], pieces[name].shape[0]
        room = with_room(own, (count + held, *own.shape[1:]))
        room[count:].copy_(pieces[name])
        pieces[name].data = room[count:]
        return room


class FP8SharedSlots(SharedSlots):
    """``SharedSlots`` of pieces that are kept in block FP8, beside experts that are.

    Args:
        module: The shared expert, which must not be written to.
        experts: Hold the pieces.
    """

    def __init__(self, layout: ExpertLayout, columns: int, module: nn.Module, experts: FP8JoinedExperts) -> None:
        super().__init__(layout, columns, module, shared_matrices)
        self.experts = experts

    def bytes_elsewhere(self, expert_bytes: int) -> int:
        """Bytes of the shared expert that a step does not read here; its pieces are in FP8, and smaller."""
        whole = sum(part.nbytes for part in shared_matrices(self.module))
        return whole - sum(part.nbytes for part in self.experts.pieces.parameters())

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _join(self, w1: Tensor, w2: Tensor) -> DecodeWeights:
        held = next((len(part) for part in self.experts.pieces.parameters()), 0)
        return self.experts.join_weights(self.table(held, w1.device))

    def _fill(self, joined: DecodeWeights) -> None:
        raise ValueError(
            "the shared expert was written to, but decode steps read it in block FP8: load the model with "
            "keep_fp8=False to change it"
        )


def has_fp8_pieces(
    tensors: dict[str, StoredTensor], modules: dict[int, str], shared: str, shape: tuple[int, int]
) -> bool:
    """Whether all shared experts are in block FP8 and of the shape ``(F_shared, D)``."""
    for module in modules.values():
        for name, wanted in zip(_matrix_names(module, shared), (shape, shape, shape[::-1]), strict=True):
            found = tensors.get(name)
            if found is None or found.scales is None or found.shape != wanted:
                return False
    return True


def piece_shards(
    tensors: dict[str, StoredTensor], module: str, shared: str, layout: ExpertLayout, width: int
) -> dict[str, LazyShard]:
    """A shard for every parameter of ``FP8JoinedExperts.pieces``; none where this rank holds no piece.

    Args:
        tensors: Of the checkpoint; ``has_fp8_pieces`` of them.
        width: Of a piece.
    """
    matrices = [as_stored(tensors[name]) for name in _matrix_names(module, shared)]
    scales = [matrix.scales for matrix in matrices if matrix.scales is not None]
    held = held_pieces(layout, width, matrices[0].shape[0])
    shards = (*_shards(matrices, held, width), *_shards(scales, held, width // FP8_BLOCK))
    return {f"{module}.pieces.{name}": shard for name, shard in zip(NAMES, shards, strict=True) if held}


def _matrix_names(module: str, shared: str) -> list[str]:
    block = module.rpartition(".")[0]
    return [f"{block}.{shared}.{part}_proj.weight" for part in ("gate", "up", "down")]


def _shards(matrices: list[StoredTensor], held: range, width: int) -> tuple[LazyShard, LazyShard]:
    """Pieces of gate, up and down, or of their scales, ``width`` rows of them each."""
    *gate_up, down = matrices
    columns = [slice(number * width, (number + 1) * width) for number in held]
    hidden_size, count = down.shape[0], len(held)
    rows = tuple(
        Piece(source=source, index=(part,), into=(slot, half))
        for slot, part in enumerate(columns)
        for half, source in enumerate(gate_up)
    )
    first = LazyShard(buffer_shape=(count, 2, width, hidden_size), shape=(count, 2 * width, hidden_size), pieces=rows)
    across = tuple(Piece(source=down, index=(ALL, part), into=(slot,)) for slot, part in enumerate(columns))
    shape = (count, hidden_size, width)
    return first, LazyShard(buffer_shape=shape, shape=shape, pieces=across)
