"""Warp decode: the routed experts of a few tokens in two launches, bound by reading their weights once.

``decode.gate_up`` and ``decode.down`` hold the kernels, ``decode.routing`` what both do first,
``decode.scales`` what they do for weights of 8 bits, ``decode.words`` the all-reduce over ranks,
``decode.gather`` what runs before them where ranks hold different tokens. ``decode.blocks`` says
which shapes of blocks are used when. Here: the launches.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ..experts.tables import CacheConstants, CachePointers
from ..experts.waves import split_waves, wave_memory, waves_of
from ..gemm.group_gemm import dot_precision
from ..runtime.arch import starts_early
from ..runtime.arguments import power_of_2
from .blocks import BlockShape, DecodeConfig, lane_of
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
    assert config.form == "matrix" or num_tokens <= 2, num_tokens
    groups = min(step.sizes[2], num_tokens * top_k)
    num_waves = 1 if step.host is None else waves_of(step.tensors.ids, step.host)
    cache, of_cache = _cache(step, groups, config.gate_up.num_warps, num_waves)
    gate_up, down = (each._replace(cache=of_cache) for each in _constants(step, config, buffer))
    # Whatever can raise comes before the first launch: a gather alone would leave the other ranks with half a step.
    w1_desc, w2_desc = _descriptors(step, config)
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
        launch, tensors = _Launch(config, groups, cache, buffer if is_last else None), tensors._replace(ids=ids)
        down = down._replace(adds_up=is_last)
        _gate_up(step, tensors, w1_desc, launch, gate_up)
        if is_last and step.host is not None and step.host.fetched is not None:
            step.host.fetched.record()
        _down(step, tensors, w2_desc, launch, down)


def _constants(step: Step, config: DecodeConfig, buffer: ReceiveBuffer | None) -> tuple[StepConstants, StepConstants]:
    """The constants of ``gate_up_kernel``, whose contraction is D, and of ``down_kernel``, whose contraction is F."""
    (num_tokens, top_k), (hidden_size, ffn_size, num_experts, _) = step.tensors.ids.shape, step.sizes
    is_vector, tokens = config.form == "vector", step.tensors.tokens
    token_block = max(1 if is_vector else LEAST_TOKENS, power_of_2(num_tokens))
    both = StepConstants(
        top_k=top_k,
        top_k_block=power_of_2(top_k),
        token_block=token_block,
        by_expert=num_tokens * top_k >= num_experts,
        vector=is_vector,
        lane=lane_of(step.w1.elements.dtype),
        shared_scale=step.shared_scale,
        precision=dot_precision(tokens.dtype),
        tile=min(config.tile, token_block),
        gathered=buffer is not None and buffer.gather is not None,
        dependent=_starts_early(config, tokens.device),
        interpret=triton.knobs.runtime.interpret,
    )
    gate_up = both._replace(
        rows=config.gate_up.rows,
        depth=config.gate_up.depth,
        even=hidden_size % config.gate_up.depth == 0,
        activation=step.activation,
        interleaved=step.interleaved,
    )
    down = both._replace(
        rows=config.down.rows,
        depth=config.down.depth,
        even=ffn_size % config.down.depth == 0,
        fold=config.fold,
        ahead=min(config.ahead, -(-ffn_size // config.down.depth)),
        world_size=1 if buffer is None else buffer.world_size,
        word_cols=WORD_COLS * config.down.num_warps,
    )
    return gate_up, down


def _descriptors(step: Step, config: DecodeConfig) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    if config.form == "vector":
        return None, None
    w1, w2 = step.w1.elements, step.w2.elements
    number = in_number(lane_of(w1.dtype))
    depths = [part_of(shape.depth, step.shared_scale) // number for shape in (config.gate_up, config.down)]
    num_slots, ffn_size = w1.shape[0], step.tensors.hidden.shape[1]
    gate_and_up = w1.view(num_slots, 2, ffn_size, -1)
    if step.interleaved:
        gate_and_up = w1.view(num_slots, ffn_size, 2, -1).transpose(1, 2)
    return (
        TensorDescriptor.from_tensor(gate_and_up, [1, 2, config.gate_up.rows, depths[0]]),
        TensorDescriptor.from_tensor(w2, [1, config.down.rows, depths[1]]),
    )


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
    gate_up_kernel[(launch.groups, triton.cdiv(ffn_size, constants.rows) + fetching_rows)](
        tensors, step.w1, w1_desc, launch.buffer and launch.buffer.words.epoch, launch.cache,
        step.tensors.ids.shape[0], hidden_size, ffn_size, num_experts, num_slots,
        STEP=constants, **_options(launch.config.gate_up, launch.buffer, starts_early),
    )  # fmt: skip


def _down(
    step: Step, tensors: StepTensors, w2_desc: TensorDescriptor | None, launch: _Launch, constants: StepConstants
) -> None:
    hidden_size, ffn_size, num_experts, num_slots = step.sizes
    num_tokens, buffer = step.tensors.ids.shape[0], launch.buffer
    blocks = (num_tokens if constants.fold else launch.groups) * triton.cdiv(hidden_size, constants.rows)
    network = (None, launch.cache, 0, 0, 0)
    if buffer is not None:
        network = (buffer.words, launch.cache, buffer.rank, buffer.max_tokens, buffer.timeout_ns)
        blocks += tensors.out.shape[0] * triton.cdiv(hidden_size, constants.word_cols)
    down_kernel[(blocks,)](
        tensors, step.w2, w2_desc, *network, num_tokens, hidden_size, ffn_size, num_experts, num_slots,
        STEP=constants, **_options(launch.config.down, buffer, constants.dependent),
    )  # fmt: skip
