"""Warp decode: the routed experts of a few tokens in two launches, bound by reading their weights once.

``decode.gate_up`` and ``decode.down`` hold the kernels, ``decode.routing`` what both do first,
``decode.scales`` what they do for weights of 8 bits, ``decode.words`` the all-reduce over ranks,
``decode.gather`` what runs before them where ranks hold different tokens. ``decode.blocks`` says
which shapes of blocks are used when. Here: the launches.
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ..experts.tables import CacheConstants, CachePointers
from ..experts.waves import split_waves, wave_memory, waves_of
from ..gemm.group_gemm import dot_precision
from ..runtime.activation import Activation
from ..runtime.arch import starts_early
from ..runtime.arguments import power_of_2
from .blocks import KINDS, BlockShape, DecodeConfig, lane_of
from .down import down_kernel
from .gate_up import gate_up_kernel
from .gather import gather
from .scales import in_number, part_of
from .step import ReceiveBuffer, Step, StepConstants, StepTensors

LEAST_TOKENS = 8  # the matrix form pads a step to as many tokens, the least that matrix instructions take
WORD_COLS = 2 * 32  # columns of the all-reduce for each warp: two for each thread, or stores get narrower


class _Launch(NamedTuple):
    """The arguments that both kernels of a wave share."""

    config: DecodeConfig
    groups: int
    cache: CachePointers | None
    buffer: ReceiveBuffer | None  # the last wave has it


def decode(step: Step, config: DecodeConfig, buffer: ReceiveBuffer | None = None) -> None:
    """Launch both kernels: ``out[t] = sum over k of routing_weights[t, k] * expert(ids[t, k])(tokens[t])``.

    Where tokens are gathered a kernel of its own is launched before them; nothing is launched where this raises.

    Args:
        step: Contiguous tensors of 1 to 64 tokens.
        buffer: Adds the sums of W > 1 ranks; ``None`` for a rank alone.
    """
    num_tokens, top_k = step.tensors.ids.shape
    groups = min(step.sizes[2], num_tokens * top_k)
    w1, w2 = step.w1.elements, step.w2.elements
    gate_up, down, *views = _constants(
        config, (num_tokens, top_k), step.sizes, (step.tensors.tokens.dtype, w1.dtype), step.shared_scale,
        step.activation, step.interleaved, (1, False) if buffer is None else (buffer.world_size, bool(buffer.gather)),
        _starts_early(config, w1.device), triton.knobs.runtime.interpret,
    )  # fmt: skip
    num_waves = 1 if step.host is None else waves_of(step.tensors.ids, step.host)
    cache, of_cache = _cache(step, groups, config.gate_up.num_warps, num_waves)
    if of_cache is not None:
        gate_up, down = (each._replace(cache=of_cache) for each in (gate_up, down))
    # Whatever can raise comes before the first launch: a gather alone would leave the other ranks with half a step.
    w1_desc, w2_desc = (view and TensorDescriptor(each, *view) for each, view in zip((w1, w2), views, strict=True))
    tensors, waves, memory = step.tensors, [step.tensors.ids], None
    if num_waves > 1:  # each expert of a wave has a slot
        memory = wave_memory(tensors.ids, step.host, num_waves)
    if gate_up.gathered:
        gather(step, buffer, dependent=gate_up.dependent)
    if memory is not None:  # the ids may have been gathered just now
        tensors = tensors._replace(all_ids=tensors.ids)
        waves = list(split_waves(tensors.ids, step.host, num_waves, memory))
    for number, ids in enumerate(waves):
        is_last = number == len(waves) - 1
        launch = _Launch(config, groups, cache, buffer if is_last else None)
        if memory is not None:
            tensors, down = tensors._replace(ids=ids), down._replace(adds_up=is_last)
        _gate_up(step, tensors, w1_desc, launch, gate_up)
        if is_last and step.host is not None and step.host.fetched is not None:
            step.host.fetched.record()
        _down(step, tensors, w2_desc, launch, down)


View = tuple[list[int], list[int], list[int]]  # shape, strides and block of a descriptor


@functools.lru_cache(maxsize=KINDS)
def _constants(
    config: DecodeConfig,
    ids_shape: tuple[int, int],
    sizes: tuple[int, int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    shared_scale: int,
    activation: Activation,
    interleaved: bool,
    network: tuple[int, bool],
    dependent: bool,
    interpret: bool,
) -> tuple[StepConstants, StepConstants, View | None, View | None]:
    """The constants of both kernels, and how their matrix forms read w1 and w2.

    ``gate_up_kernel`` contracts over D, ``down_kernel`` over F. Kept, because the host would make them for longer than
    the GPU runs a step.

    Args:
        dtypes: Of the tokens and of the stored weights.
        network: Ranks, and whether tokens of all of them are gathered.
    """
    (num_tokens, top_k), (hidden_size, ffn_size, num_experts, num_slots) = ids_shape, sizes
    is_vector = config.form == "vector"
    assert not is_vector or num_tokens <= 2, num_tokens
    token_block = max(1 if is_vector else LEAST_TOKENS, power_of_2(num_tokens))
    both = StepConstants(
        top_k=top_k,
        top_k_block=power_of_2(top_k),
        token_block=token_block,
        by_expert=num_tokens * top_k >= num_experts,
        vector=is_vector,
        lane=lane_of(dtypes[1]),
        shared_scale=shared_scale,
        precision=dot_precision(dtypes[0]),
        tile=min(config.tile, token_block),
        gathered=network[1],
        dependent=dependent,
        interpret=interpret,
    )
    gate_up = both._replace(
        rows=config.gate_up.rows,
        depth=config.gate_up.depth,
        even=hidden_size % config.gate_up.depth == 0,
        activation=activation,
        interleaved=interleaved,
    )
    down = both._replace(
        rows=config.down.rows,
        depth=config.down.depth,
        even=ffn_size % config.down.depth == 0,
        fold=config.fold,
        ahead=min(config.ahead, -(-ffn_size // config.down.depth)),
        world_size=network[0],
        word_cols=WORD_COLS * config.down.num_warps,
    )
    if is_vector:
        return gate_up, down, None, None
    number = in_number(both.lane)
    depths = [part_of(each.depth, shared_scale) // number for each in (gate_up, down)]
    row1, row2 = hidden_size // number, ffn_size // number
    halves = [row1, 2 * row1] if interleaved else [ffn_size * row1, row1]
    view1 = [num_slots, 2, ffn_size, row1], [2 * ffn_size * row1, *halves, 1], [1, 2, gate_up.rows, depths[0]]
    view2 = [num_slots, hidden_size, row2], [hidden_size * row2, row2, 1], [1, down.rows, depths[1]]
    return gate_up, down, view1, view2


def _cache(
    step: Step, groups: int, num_warps: int, num_waves: int
) -> tuple[CachePointers, CacheConstants] | tuple[None, None]:
    """Pointers and constants of an expert cache for both kernels; gate/up, of ``num_warps`` a block, alone fetches."""
    if step.host is None:
        return None, None
    host = step.host if num_waves == 1 else replace(step.host, mail=None)  # Waves do not ask the host's cores.
    slots = step.w1.elements, step.w2.elements, step.w1.scales, step.w2.scales
    return host.pointers(*slots), host.constants(groups, num_warps)


def _starts_early(config: DecodeConfig, device: torch.device) -> bool:
    """The interpreter, and GPUs before Hopper, run one kernel after the other and know no dependent launch."""
    return config.dependent and not triton.knobs.runtime.interpret and starts_early(device)


def _options(shape: BlockShape, buffer: ReceiveBuffer | None, starts_early: bool) -> dict[str, Any]:
    """The options of a launch; the interpreter knows no limit of registers, and an all-reduce would not fit into it."""
    options: dict[str, Any] = dict(num_warps=shape.num_warps, num_stages=shape.num_stages)
    if shape.max_registers and (buffer is None or buffer.world_size == 1) and not triton.knobs.runtime.interpret:
        options["maxnreg"] = shape.max_registers
    return options | ({"launch_pdl": True} if starts_early else {})


def _gate_up(
    step: Step, tensors: StepTensors, w1_desc: TensorDescriptor | None, launch: _Launch, constants: StepConstants
) -> None:
    hidden_size, ffn_size, num_experts, num_slots = step.sizes
    fetching_rows = constants.cache.rows if constants.cache else 0
    starts_early = constants.gathered and constants.dependent
    gate_up_kernel[(launch.groups, -(-ffn_size // constants.rows) + fetching_rows)](
        tensors, step.w1, w1_desc, launch.buffer and launch.buffer.words.epoch, launch.cache,
        step.tensors.ids.shape[0], hidden_size, ffn_size, num_experts, num_slots,
        STEP=constants, **_options(launch.config.gate_up, launch.buffer, starts_early),
    )  # fmt: skip


def _down(
    step: Step, tensors: StepTensors, w2_desc: TensorDescriptor | None, launch: _Launch, constants: StepConstants
) -> None:
    hidden_size, ffn_size, num_experts, num_slots = step.sizes
    num_tokens, buffer = step.tensors.ids.shape[0], launch.buffer
    blocks = (num_tokens if constants.fold else launch.groups) * -(-hidden_size // constants.rows)
    network = (None, launch.cache, 0, 0, 0)
    if buffer is not None:
        network = (buffer.words, launch.cache, buffer.rank, buffer.max_tokens, buffer.timeout_ns)
        blocks += tensors.out.shape[0] * -(-hidden_size // constants.word_cols)
    down_kernel[(blocks,)](
        tensors, step.w2, w2_desc, *network, num_tokens, hidden_size, ffn_size, num_experts, num_slots,
        STEP=constants, **_options(launch.config.down, buffer, constants.dependent),
    )  # fmt: skip
