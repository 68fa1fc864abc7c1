"""Warp decode: the routed experts of a few tokens in two launches, bound by reading their weights once.

``decode.gate_up`` and ``decode.down`` hold the kernels, ``decode.routing`` what both do first,
``decode.scales`` what they do for weights of 8 bits, ``decode.words`` the all-reduce over ranks,
``decode.gather`` what runs before them where ranks hold different tokens. ``decode.blocks`` says
which shapes of blocks are used when. Here: the launches.
"""

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..experts.tables import CacheConstants
from ..experts.waves import count_waves
from ..gemm.group_gemm import dot_precision
from ..runtime.arch import starts_early
from .blocks import BlockShape, DecodeConfig, lane_of, least_depth
from .down import down_kernel
from .gate_up import gate_up_kernel
from .gather import gather
from .scales import in_number, part_of
from .step import Landing, Step

LEAST_TOKENS = 8  # what the matrix form pads the tokens of a step to, the least the matrix instructions take
WORD_COLS = 2 * 32  # columns of the all-reduce for each warp: two for each thread, or stores get narrower


def decode(step: Step, config: DecodeConfig, landing: Landing | None = None) -> None:
    """Launch both kernels: ``out[t] = sum over k of routing_weights[t, k] * expert(ids[t, k])(tokens[t])``.

    A landing that gathers has a kernel of its own launched before them; nothing is launched where this raises.

    Args:
        step: Tensors; contiguous, T between 1 and 64.
        config: Shapes of blocks.
        landing: Adds the sums of W > 1 ranks; ``None`` for a rank alone.

    Raises:
        ValueError: If the vector form meets more than two tokens, or the matrix form's depth the wrong scales.
    """
    (num_tokens, top_k), num_experts = step.ids.shape, step.slots.shape[0]
    if config.form == "vector" and num_tokens > 2:
        raise ValueError(f"T={num_tokens} must be at most 2 for form='vector'")
    _check_depth(config, step)
    routed_rows = num_tokens * top_k
    by_expert = routed_rows >= num_experts
    groups = num_experts if by_expert else routed_rows
    gathered = landing is not None and landing.gather is not None
    least = 1 if config.form == "vector" else LEAST_TOKENS
    constants = dict(
        K=top_k, K_BLOCK=triton.next_power_of_2(top_k), T_BLOCK=max(least, triton.next_power_of_2(num_tokens)),
        BY_EXPERT=by_expert, VECTOR=config.form == "vector", LANE=lane_of(step.w1.dtype),
        SCALES=step.shared_scale, PRECISION=dot_precision(step.tokens.dtype), GATHERED=gathered,
        DEPENDENT=_starts_early(config, step.tokens.device),
    )  # fmt: skip
    constants["TILE"] = min(config.tile, constants["T_BLOCK"])
    cache, of_step = _cache(step, groups, config.gate_up.num_warps)
    # Whatever can raise comes before the first launch: a gather alone would leave the other ranks with half a step.
    w1, w2 = _weights(step, config)
    if gathered:
        gather(step, landing, dependent=constants["DEPENDENT"])
    waves = [step.ids] if step.waves is None else step.waves.unbind()
    for number, ids in enumerate(waves):
        is_last = number == len(waves) - 1
        to = landing if is_last else None
        of_wave = constants | {"CACHE": of_step and of_step.of_wave(number, len(waves))}
        _gate_up(step, ids, w1, config, to, groups, cache, of_wave)
        if is_last and step.host is not None and step.host.fetched is not None:
            step.host.fetched.record()
        _down(step, ids, w2, config, to, groups, cache, of_wave | {"ADDS_UP": is_last})


def _weights(step: Step, config: DecodeConfig) -> tuple[Tensor | TensorDescriptor, Tensor | TensorDescriptor]:
    """Both weights as the kernels take them."""
    if config.form == "vector":
        return step.w1, step.w2
    num_slots, _, ffn_size = step.sizes
    gate_and_up = step.w1.view(num_slots, 2, ffn_size, -1)
    number = in_number(lane_of(step.w1.dtype))
    depths = [part_of(shape.depth, step.shared_scale) // number for shape in (config.gate_up, config.down)]
    return (
        TensorDescriptor.from_tensor(gate_and_up, [1, 2, config.gate_up.rows, depths[0]]),
        TensorDescriptor.from_tensor(step.w2, [1, config.down.rows, depths[1]]),
    )


def _cache(step: Step, groups: int, num_warps: int) -> tuple[tuple[Tensor, ...], CacheConstants] | tuple[None, None]:
    """What both kernels take of an expert cache; ``num_warps`` of a block of gate/up, which alone fetches."""
    host = step.host
    if host is None:
        return None, None
    num_waves = 1 if step.waves is None else len(step.waves)
    least = count_waves(step.ids.numel(), host.w1.shape[0], host.tables.num_slots)
    assert num_waves >= least, "each expert of a wave has a slot"
    slots = step.w1, step.w2, step.w1_scales, step.w2_scales
    return host.pointers(*slots), host.constants(groups, num_warps)


def _check_depth(config: DecodeConfig, step: Step) -> None:
    """In the matrix form a step holds whole groups of MX, and is as long as TMA swizzles."""
    if config.form == "vector" or step.shared_scale == 0:
        return
    least = least_depth(lane_of(step.w1.dtype))
    for name, depth in (("gate_up", config.gate_up.depth), ("down", config.down.depth)):
        if depth < least:
            raise ValueError(
                f"{name}.depth={depth} must be at least {least} for form='matrix' and weights with a scale per "
                f"{step.shared_scale}{' in four bits' if least > 32 else ''}"
            )


def _starts_early(config: DecodeConfig, device: torch.device) -> bool:
    """The interpreter, and GPUs before Hopper, run one kernel after the other and know no dependent launch."""
    return config.dependent and not triton.knobs.runtime.interpret and starts_early(device)


def _registers(shape: BlockShape, landing: Landing | None) -> dict[str, int]:
    """The limit as a launch option, which the interpreter does not know."""
    limit = most_registers(shape, 1 if landing is None else landing.addresses.numel())
    return {} if limit is None or triton.knobs.runtime.interpret else {"maxnreg": limit}


def most_registers(shape: BlockShape, world_size: int) -> int | None:
    """Most registers of a thread, ``None`` for no limit; the all-reduce over ranks would not fit into fewer."""
    return (shape.max_registers or None) if world_size == 1 else None


def _gate_up(
    step: Step,
    ids: Tensor,
    w1: Tensor | TensorDescriptor,
    config: DecodeConfig,
    landing: Landing | None,
    groups: int,
    cache: tuple[Tensor, ...] | None,
    constants: dict,
) -> None:
    shape = config.gate_up
    num_slots, hidden_size, ffn_size = step.sizes
    options = _registers(shape, landing)
    options |= {"launch_pdl": True} if constants["GATHERED"] and constants["DEPENDENT"] else {}
    fetching_rows = constants["CACHE"].rows if constants["CACHE"] else 0
    gate_up_kernel[(groups, triton.cdiv(ffn_size, shape.rows) + fetching_rows)](
        step.tokens, ids, step.slots, w1, step.w1_scales, step.b1, step.hidden,
        step.tickets if landing is None else landing.epoch, step.routing_weights, cache,
        step.ids.shape[0], hidden_size, ffn_size, step.slots.shape[0], num_slots,
        BLOCK_F=shape.rows, BLOCK_K=shape.depth, EVEN_K=hidden_size % shape.depth == 0, ADVANCE=landing is not None,
        ACTIVATION=step.activation, num_warps=shape.num_warps, num_stages=shape.num_stages, **constants, **options,
    )  # fmt: skip


def _down(
    step: Step,
    ids: Tensor,
    w2: Tensor | TensorDescriptor,
    config: DecodeConfig,
    landing: Landing | None,
    groups: int,
    cache: tuple[Tensor, ...] | None,
    constants: dict,
) -> None:
    shape = config.down
    num_slots, hidden_size, ffn_size = step.sizes
    num_tokens = step.ids.shape[0]
    if config.fold:
        groups = num_tokens
    blocks = groups * triton.cdiv(hidden_size, shape.rows)
    world_size, network = 1, (step.tickets, step.tickets, step.tickets, 0, 0, 0)
    if landing is not None:
        world_size = landing.addresses.numel()
        network = (
            landing.addresses, landing.epoch, landing.fault, landing.rank, landing.max_tokens, landing.timeout_ns
        )  # fmt: skip
        blocks += step.out.shape[0] * triton.cdiv(hidden_size, WORD_COLS * shape.num_warps)
    options = _registers(shape, landing) | ({"launch_pdl": True} if constants["DEPENDENT"] else {})
    down_kernel[(blocks,)](
        step.hidden, ids, step.slots, step.routing_weights, w2, step.w2_scales, step.b2, step.partials,
        step.tickets, step.out, *network, cache, None if step.waves is None else step.all_ids,
        num_tokens, hidden_size, ffn_size, step.slots.shape[0], num_slots,
        FOLD=config.fold, BLOCK_D=shape.rows, BLOCK_K=shape.depth, EVEN_K=ffn_size % shape.depth == 0, W=world_size,
        WORD_COLS=WORD_COLS * shape.num_warps, AHEAD=min(config.ahead, triton.cdiv(ffn_size, shape.depth)),
        INTERPRET=triton.knobs.runtime.interpret,
        num_warps=shape.num_warps, num_stages=shape.num_stages, **constants, **options,
    )  # fmt: skip
