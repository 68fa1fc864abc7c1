"""What the model works on: a layer call with how densely its tokens are routed, and a machine with what it can do.

Letters (design section 2): T tokens per rank, K, E, e = E / EP, D, F, W = EP x TP. Expectations are in closed form.

Every number of a machine is a measurement, a data sheet's or a fit, and says which; ``H200`` is the default. What whole
layers it was fitted to, and how well it agrees: ``benchmarks/results/tuner.md``, ``tests/tuner/test_tuner.py``.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields, replace

import torch

from comet.config import DIM_MULTIPLE, MOE_DTYPES, MoEConfig, OverlapConfig, ParallelConfig, require
from comet.layout import MAX_PANELS, round_up
from comet.schedule.settings import GPU_TILE_ROWS, TileShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Rates in 1e9 bytes/s (``gbs``) or TFLOP/s, times in ms; the defaults describe the H200."""

    name: str = "NVIDIA H200"  # device name as the driver gives it
    num_sms: int = 132  # SMs, and thread blocks of a fused kernel
    cuda_kernels: bool = True  # whether kernels in CUDA C++ run here: a GPU of sm_90, with a compiler
    # 16-bit grouped GEMM on all SMs without tile overhead and heat. Fit; cuBLAS dense reaches 790
    gemm_tflops: float = 770.0
    # the same in IEEE float32, without tensor cores. Data sheet, 67 at boost clock, less 25 %
    fp32_tflops: float = 50.0
    hbm_gbs: float = 4600.0  # memory reads. Measured
    heat_slowdown: float = 1.10  # power limit on a long layer, as a factor. Measured
    heat_start_ms: float = 2.0  # GEMM time of a layer from which the power limit shows. Fit
    heat_full_ms: float = 8.0  # GEMM time at which it is fully there. Fit
    link_gbs: float = 385.0  # rate of the copy engines, which no kernel exceeds. Measured
    l2_gbs_per_sm: float = 64.0  # tile operands from L2 to one SM. Fit
    exposed_push: float = 0.2  # part of the push, at the link's rate, by which it lengthens layer 0's GEMM. Fit
    combine_passes: float = 1.75  # what the combine costs layer 1's GEMM, over its memory traffic. Fit
    panel_ns: float = 3.5  # what a panel more costs layer 1, per column of the result. Fit
    launch_ms: float = 0.01  # start and end of a launch: first loads, last stores, late ranks. Fit
    plan_ms: float = 0.011  # plan of an empty call: launches and the exchange of ids. benchmarks/results/plan.md
    plan_ns_per_row: float = 0.085  # what each of the W*T*K ids adds to it. The same
    nccl_gbs: float = 200.0  # all-to-all of the plain path. Fit
    pass_gbs: float = 3500.0  # element-wise and gather passes of the plain path. Fit
    plain_ms: float = 1.0  # launches and the host's wait for the counts on the plain path. Fit

    def __post_init__(self) -> None:
        require(self.num_sms >= 2, f"num_sms={self.num_sms} must be at least 2: one block computes, one communicates")
        for name in (item.name for item in fields(self)):
            value = getattr(self, name)
            require(isinstance(value, (str, bool)) or value > 0, f"{name}={value} must be positive")

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        """The H200's rates under a device's name and number of SMs; measurements correct what does not fit."""
        if device.type != "cuda":
            return cls(name=device.type, cuda_kernels=False)
        from comet.kernels.runtime.nvrtc import is_available  # needs Triton, as GPUs do

        properties = torch.cuda.get_device_properties(device)
        name, num_sms = properties.name, properties.multi_processor_count
        return cls(name=name, num_sms=num_sms, cuda_kernels=is_available(device))

    def tflops(self, dtype: torch.dtype) -> float:
        """GEMM rate on all SMs."""
        return self.fp32_tflops if dtype == torch.float32 else self.gemm_tflops

    def throttle(self, layer_gemm_ms: float) -> float:
        """Factor >= 1 by which heat lengthens the GEMMs of a layer; of the H200, 10 ms: 1.10, 5 ms: 1.05."""
        part = (layer_gemm_ms - self.heat_start_ms) / (self.heat_full_ms - self.heat_start_ms)
        return 1 + (self.heat_slowdown - 1) * min(1.0, max(0.0, part))


H200 = Machine()


TAIL_DEVIATIONS = 6  # beyond them a probability counts as 0 or 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One layer call, as every rank sees it; ``Problem.create`` fills in uniform routing."""

    moe: MoEConfig  # shape of the layer
    parallel: ParallelConfig  # EP and TP
    num_tokens: int  # T of this call, 0 or more
    dtype: torch.dtype  # element type of tokens and weights
    reach: float  # probability that a token goes to a given EP shard, 0 .. 1: its rank-deduplicated rows per rank

    def __post_init__(self) -> None:
        self.parallel.check(self.moe)
        require(self.num_tokens >= 0, f"num_tokens={self.num_tokens} must be at least 0")
        require(self.dtype in MOE_DTYPES, f"dtype={self.dtype} must be one of {MOE_DTYPES}")
        require(0 <= self.reach <= 1, f"reach={self.reach} must be between 0 and 1: it is a probability")

    @classmethod
    def create(cls, moe: MoEConfig, parallel: ParallelConfig, num_tokens: int, dtype: torch.dtype) -> Problem:
        """The problem under uniform random routing."""
        reach = shard_reach(moe.num_experts, moe.top_k, parallel.ep, moe.num_groups, moe.top_groups)
        return cls(moe=moe, parallel=parallel, num_tokens=num_tokens, dtype=dtype, reach=reach)

    @property
    def world_size(self) -> int:
        """W."""
        return self.parallel.world_size

    @property
    def width(self) -> int:
        """F / TP, the part of an expert one rank holds."""
        return self.moe.ffn_size // self.parallel.tp

    @property
    def experts_local(self) -> int:
        """e."""
        return self.moe.num_experts // self.parallel.ep

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row."""
        return self.moe.hidden_size * self.dtype.itemsize

    @property
    def sent_rows(self) -> float:
        """Rows a rank sends to the others in the dispatch; T=8, W=4, reach 0.5: 12."""
        return self.num_tokens * (self.world_size - 1) * self.reach

    @property
    def recv_rows(self) -> float:
        """Received rows of a rank, its own tokens included; T=8, W=4, reach 0.5: 16."""
        return self.world_size * self.num_tokens * self.reach

    @property
    def routed_rows(self) -> float:
        """Routed rows of a rank; T=8, W=4, EP=2, K=2: 32."""
        return self.world_size * self.num_tokens * self.moe.top_k / self.parallel.ep

    def num_tiles(self, block_rows: int, tallest: int = 0) -> float:
        """Expected tiles of a rank, the partially filled ones included; ``tallest`` as ``expected_tiles`` has it."""
        chance = self.moe.top_k / self.moe.num_experts
        return self.experts_local * expected_tiles(self.world_size * self.num_tokens, chance, block_rows, tallest)


def shard_reach(num_experts: int, top_k: int, ep: int, num_groups: int = 1, top_groups: int = 1) -> float:
    """Probability that K distinct random experts include one of a given EP shard, averaged over the shards.

    Without groups it is ``1 - C(E - e, K) / C(E, K)``. With groups, ``top_groups`` of them are drawn first and the
    experts from these; the sum then runs over how many experts of the shard the drawn groups contain.

    Example: E=8, K=2, EP=4: ``1 - C(6, 2) / C(8, 2) = 13/28``.
    """
    experts_local, group_size = num_experts // ep, num_experts // num_groups
    open_experts = top_groups * group_size
    draws = math.comb(num_groups, top_groups) * math.comb(open_experts, top_k)
    missed = 0
    for shard in range(ep):
        covered_ways = _covered_ways(shard * experts_local, experts_local, num_groups, group_size, top_groups)
        missed += sum(ways * math.comb(open_experts - covered, top_k) for covered, ways in covered_ways.items())
    return 1 - missed / (ep * draws)


def _covered_ways(first: int, count: int, num_groups: int, group_size: int, top_groups: int) -> dict[int, int]:
    """In how many draws of ``top_groups`` groups they contain c of the experts ``first .. first + count - 1``."""
    ways = Counter({(0, 0): 1})  # (groups drawn, experts covered)
    for group in range(num_groups):
        low, high = group * group_size, (group + 1) * group_size
        inside = max(0, min(high, first + count) - max(low, first))
        drawn = Counter({(num + 1, covered + inside): n for (num, covered), n in ways.items() if num < top_groups})
        ways.update(drawn)
    return {covered: n for (num, covered), n in ways.items() if num == top_groups}


def expected_tiles(num_rows: int, chance: float, block_rows: int, tallest: int = 0) -> float:
    """Expected tiles of an expert that each of ``num_rows`` rows chooses with probability ``chance``.

    ``ceil(n / B)`` is the number of j >= 0 with ``n > j * B``, so the expectation sums their probabilities: exact for
    j = 0, by the normal distribution (with continuity correction) beyond.

    An expert of up to ``tallest`` rows is one tile, if that is more than a tile has else.

    Example: 1 row, chance 1/4: 0.25 tiles; 256 rows, chance 1, 128 rows per tile: 2 tiles, with ``tallest=256`` 1.
    """
    mean = num_rows * chance
    deviation = math.sqrt(mean * (1 - chance))
    total = 1 - (1 - chance) ** num_rows
    low, high = mean - TAIL_DEVIATIONS * deviation, mean + TAIL_DEVIATIONS * deviation

    def more_than(edge: int) -> float:
        if deviation == 0:
            return float(mean > edge)
        return 0.5 * math.erfc((edge + 0.5 - mean) / deviation / math.sqrt(2))

    certain = max(0, math.ceil(low / block_rows) - 1)  # edges j * B from j = 1 on that lie below
    total += certain
    for edge in range((certain + 1) * block_rows, min(num_rows, math.ceil(high)), block_rows):
        total += more_than(edge)
    if tallest > block_rows:
        total -= more_than(block_rows) - more_than(tallest)
    return total


def cuda_layers(problem: Problem, machine: Machine) -> tuple[bool, bool]:
    """Whether layer 0 and layer 1 of a forward pass run in CUDA C++ rather than in Triton.

    Example:
        Qwen3-30B-A3B on four H200 in bfloat16: yes, yes; with 16 experts per token: yes, no.
    """
    if not machine.cuda_kernels:
        return False, False
    # Not above: these modules need Triton, and what is asked of a machine without GPUs works without it.
    from comet.kernels.layer import dispatch_gemm as layer0
    from comet.kernels.layer import gemm_combine as layer1

    moe, experts, width = problem.moe, problem.experts_local, round_up(problem.width, DIM_MULTIPLE)
    tile = problem.dtype.itemsize, GPU_TILE_ROWS
    return (
        layer0.fits((experts, 2 * width, moe.hidden_size), *tile),
        layer1.fits(max(moe.top_k, problem.world_size), experts, *tile),
    )


def default_setting(problem: Problem) -> OverlapConfig:
    """The setting where nothing was measured: that of ``OverlapConfig``, but one panel on one rank.

    There no row travels while others are computed, and one panel less is 1 to 6 % of a layer
    (``benchmarks/results/tuner.md``).
    """
    return OverlapConfig(num_panels=1) if problem.parallel.world_size == 1 else OverlapConfig()


def effective(setting: OverlapConfig, problem: Problem) -> OverlapConfig:
    """The setting as the layer takes it, within its limits; settings that come to the same launches have equal results.

    Example: 8 panels of D=512 in bfloat16, which are 2 column blocks: 2 panels.
    """
    return replace(setting, num_panels=fitting_panels(setting.num_panels, problem))


def candidate_name(setting: OverlapConfig | None, problem: Problem, machine: Machine) -> str:
    """Short name of a candidate, with where its layers run.

    Example: the default setting is ``4 panels, in Triton``, ``4 panels, both layers in CUDA C++`` or ``4 panels, layer
    0 in CUDA C++``; with a split ``16 comm blocks, 4 panels, in Triton``.
    """
    if setting is None:
        return "plain"
    in_cuda = cuda_layers(problem, machine)
    where = "in Triton"
    if any(in_cuda):
        where = f"{'both layers' if all(in_cuda) else f'layer {in_cuda.index(True)}'} in CUDA C++"
    split = [counted(setting.comm_blocks, "comm block")] if setting.comm_blocks else []
    return ", ".join([*split, counted(fitting_panels(setting.num_panels, problem), "panel"), where])


def counted(num: int, name: str) -> str:
    """``1 panel``, ``2 panels``."""
    return f"{num} {name}" if num == 1 else f"{num} {name}s"


def fitting_panels(num_panels: int, problem: Problem) -> int:
    """The number of panels layer 1 uses: no more than its column blocks."""
    return min(num_panels, MAX_PANELS, column_blocks(problem)[1])


def column_blocks(problem: Problem) -> tuple[int, int]:
    """Column blocks of the tiles of layer 0 and of layer 1; bfloat16, D=2048, F=768: 6 and 8."""
    tile = TileShape.select(problem.dtype, problem.moe.hidden_size, problem.width)
    return -(-problem.width // tile.block_f), -(-problem.moe.hidden_size // tile.block_n)
