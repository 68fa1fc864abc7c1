"""What the model knows of a machine: every number is a measurement, a data sheet's or a fit, and says which.

``H200`` is the default. "Design" is the project's design notes (sections 5, 6 and 8: one host of H200 GPUs, NV18),
"fit" runs 1 (plain) to 4 (Triton) of ``benchmarks/RESULTS.md``. What is named ``cuda_`` was fitted, at EP4 in bfloat16,
to how much faster than Triton layer 0 (run 6) and layer 1 (run 5) are in CUDA C++, alone and in one loop. "Profile fit"
is a later one, to the fused candidates of ``configs/profiles/nvidia_h200_x2.json`` (run 8: 20 points at EP2, 512 to
8192 tokens, measured without the host's launches): how long they take, and which is the fastest; with less weight to
those of ``nvidia_h200_x4.json``, which were measured with them. It has no weight for run 5's panels: at EP4 six and
eight were best.
``tests/cpu/test_tuner.py`` and ``tests/cpu/test_tuner_shipped.py`` assert how well all this agrees.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, fields

import torch

from comet.config import require


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Rates in 1e9 bytes/s (``gbs``) or TFLOP/s, times in ms; the defaults describe the H200.

    Args:
        name: Device name as the driver gives it.
        num_sms: SMs, and thread blocks of a fused kernel.
        cuda_kernels: Whether kernels in CUDA C++ run here: a GPU of sm_90, with a compiler.
        gemm_tflops: 16-bit grouped GEMM on all SMs without tile overhead and heat. Fit; cuBLAS dense reaches 790.
        fp32_tflops: The same in IEEE float32, without tensor cores. Data sheet, 67 at boost clock, less 25 %.
        narrow_share: Rate of tiles of fewer than 128 rows over that of 128, whose warp groups share operands. Fit to
            ``comet tune`` on two H200.
        tile_overhead_ms: Start and end of one tile that no pipeline hides. Profile fit.
        l2_gbs_per_sm: Tile operands from L2 to one SM: 64 bytes per clock at 1.7 GHz. Architecture.
        hbm_gbs: Memory reads. Design section 6.
        heat_slowdown: Power limit on a long layer, as a factor. Design section 8.8.
        heat_start_ms: GEMM time of a layer from which the power limit shows. Fit.
        heat_full_ms: GEMM time at which it is fully there. Fit.
        power_exponent: Of SMs in the power relief: 116 of 132 SMs lose 6.5 %, not 12 %. Design section 5.
        reread_share: Part of the time of reading the layer-0 weights again that a further phase costs. Design section
            8.3: +3 % (Mixtral), +7 % (Qwen3), +15-20 % (DeepSeek) for three more phases.
        push_gbs: (comm blocks, rate) of a stand-alone push in flagged chunks, ascending. Design sections 6 and 8.2; up
            to 8 blocks a fit to what 4 of them cost beside a GEMM, ``comet tune`` on two H200.
        push_share: Rate beside a running GEMM over the stand-alone rate. Design section 8, "comm only" columns.
        link_gbs: Copy-engine rate, which no kernel exceeds. Design section 6.
        copy_ms: Start of the two copies, rows and flags, from one rank to one other. Design section 6: 5-7 us for each
            copy launched by the host; not measured yet in a graph.
        reduce_gbs_per_block: Partial sums one block reduces and sends. Fit to the ratios of design section 8.7.
        beside_passes: What comm blocks beside compute blocks cost layer 1, over the combine's memory traffic. Fit.
        fused_share: GEMM rate inside a fused kernel over the GEMM alone (gathered rows, tickets, flags). Fit.
        signal_ms: One flag between ranks, with the skew of the ranks' starts. Fit.
        panel_ms: Flags of one panel of layer 1 in Triton. Profile fit.
        last_ms: Reduce and final sum of all columns of a few rows after layer 1's GEMM, in Triton beside it: one block
            goes through them, however many blocks are idle. Of P panels it takes a P-th. Profile fit.
        launch_ms: Start and end of one fused launch: first loads, last stores, late ranks. Profile fit.
        cuda_l2_gbs_per_sm: Rows and weights from L2 to one SM in CUDA C++. Profile fit.
        cuda_exposed_push: Part of the push, at the link's rate, by which it lengthens layer 0's GEMM. Fit.
        cuda_passes: What the combine costs layer 1's GEMM, over its memory traffic. Profile fit.
        cuda_panel_ns: What a panel more costs layer 1, per column of the result. Profile fit.
        cuda_launch_ms: Start and end of a launch in CUDA C++, late ranks. Profile fit.
        plan_ms: Plan of an empty call: launches and the exchange of ids. ``benchmarks/RESULTS.md``, run 8.
        plan_ns_per_row: What each of the W*T*K ids adds to it. The same.
        nccl_gbs: All-to-all of the plain path. Fit.
        pass_gbs: Element-wise and gather passes of the plain path. Fit.
        plain_ms: Launches and the host's wait for the counts on the plain path. Fit.

    Raises:
        ValueError: If a number is not positive or ``push_gbs`` does not ascend.
    """

    name: str = "NVIDIA H200"
    num_sms: int = 132
    cuda_kernels: bool = True
    gemm_tflops: float = 770.0
    fp32_tflops: float = 50.0
    narrow_share: float = 0.72
    tile_overhead_ms: float = 0.0025
    l2_gbs_per_sm: float = 109.0
    hbm_gbs: float = 4600.0
    heat_slowdown: float = 1.10
    heat_start_ms: float = 2.0
    heat_full_ms: float = 8.0
    power_exponent: float = 0.48
    reread_share: float = 0.45
    push_gbs: tuple[tuple[int, float], ...] = ((1, 24.0), (4, 95.0), (8, 190.0), (16, 325.0), (64, 361.0))
    push_share: float = 0.8
    link_gbs: float = 385.0
    copy_ms: float = 0.012
    reduce_gbs_per_block: float = 3.2
    beside_passes: float = 1.2
    fused_share: float = 0.93
    signal_ms: float = 0.01
    panel_ms: float = 0.001
    last_ms: float = 0.058
    launch_ms: float = 0.0085
    cuda_l2_gbs_per_sm: float = 64.0
    cuda_exposed_push: float = 0.2
    cuda_passes: float = 1.75
    cuda_panel_ns: float = 3.5
    cuda_launch_ms: float = 0.01
    plan_ms: float = 0.011
    plan_ns_per_row: float = 0.085
    nccl_gbs: float = 200.0
    pass_gbs: float = 3500.0
    plain_ms: float = 1.0

    def __post_init__(self) -> None:
        require(self.num_sms >= 2, f"num_sms={self.num_sms} must be at least 2: one block computes, one communicates")
        for name in (item.name for item in fields(self)):
            value = getattr(self, name)
            require(isinstance(value, (str, tuple, bool)) or value > 0, f"{name}={value} must be positive")
        blocks, rates = zip(*self.push_gbs, strict=True)
        ascending = all(list(column) == sorted(set(column)) and column[0] > 0 for column in (blocks, rates))
        require(ascending, f"push_gbs={self.push_gbs} must ascend in comm blocks and in rate, from above 0")

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        """The H200's rates under a device's name and number of SMs; measurements correct what does not fit."""
        if device.type != "cuda":
            return cls(name=device.type, cuda_kernels=False)
        from comet.kernels.nvrtc import is_available  # needs Triton, as GPUs do

        properties = torch.cuda.get_device_properties(device)
        name, num_sms = properties.name, properties.multi_processor_count
        return cls(name=name, num_sms=num_sms, cuda_kernels=is_available(device))

    def push_rate(self, comm_blocks: int) -> float:
        """GB/s that ``comm_blocks`` push beside a GEMM: linear between the measured points, flat past the last.

        Example: of the H200, 12 blocks: 0.8 * (190 + 325) / 2 = 206.
        """
        blocks, rates = zip(*self.push_gbs, strict=True)
        at = bisect_left(blocks, comm_blocks)
        if at == len(blocks):
            rate = rates[-1]
        elif at == 0:
            rate = rates[0] * comm_blocks / blocks[0]
        else:
            part = (comm_blocks - blocks[at - 1]) / (blocks[at] - blocks[at - 1])
            rate = rates[at - 1] + part * (rates[at] - rates[at - 1])
        return min(rate * self.push_share, self.link_gbs)

    def tflops(self, dtype: torch.dtype) -> float:
        """GEMM rate on all SMs."""
        return self.fp32_tflops if dtype == torch.float32 else self.gemm_tflops

    def throttle(self, layer_gemm_ms: float, num_blocks: int) -> float:
        """Factor >= 1 by which heat lengthens the GEMMs of a layer; idle SMs leave power to the others.

        Example: of the H200, 10 ms on all 132 SMs: 1.10; on 116: 1.034.
        """
        part = (layer_gemm_ms - self.heat_start_ms) / (self.heat_full_ms - self.heat_start_ms)
        heat = 1 + (self.heat_slowdown - 1) * min(1.0, max(0.0, part))
        return max(1.0, heat * (num_blocks / self.num_sms) ** self.power_exponent)


H200 = Machine()
