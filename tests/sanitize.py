"""Launch every kernel on small cases, on one GPU and in one process, for compute-sanitizer.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 python tests/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize.py

``--report-api-errors no``, because ``cuda.bindings`` asks the driver for functions that it may not have. Each takes two
to four minutes; with ``--dtype`` for one type of elements alone.

The process plays all ranks (``comet.comm.emulated_group``), one after the other: no kernel may wait for a later rank.
Hence every step in which ranks wait for each other runs twice: first with flags that pretend everything has arrived,
while the ranks send what they have to send; then again, with everything there. What the second run leaves is compared
with plain torch. On a CPU it runs under the interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from decode_cases import FOLD, MATRIX, VECTOR, DecodeCase, check_decode
from decode_ranks import compare_step, gathered_inputs, shard, step_inputs
from fp8_cases import compare, float32_products, layer_of, tensor_core_products
from fp8_launches import fp8_layer0_in, fp8_layer1_in
from layer0_launches import exact_layer0, run_layer0
from layer1_launches import exact_layer1, run_layer1
from layer_cases import assert_as_close
from played_ranks import Kind, PlayedCase
from router_kernel_cases import check_logits, check_measure, check_select, check_top_k
from stress_cases import StressCase
from stress_numbers import FullWeights, expected, stress_inputs
from stress_numbers import shard as shard_layer
from torch import Tensor

from comet import fused
from comet.comm import emulated_group
from comet.decode import DecodeWeights, RankDecode, rank_slots
from comet.kernels.recorder import ALIGN_ROUNDS, Recorder, align
from comet.layout import ExpertLayout
from comet.plan import Plan, begin_plan, routed_row_capacity
from comet.quantize import quantize_fp8
from comet.settings import LayerSettings
from comet.workspace import Workspace, WorkspaceShape

DEADLINE_S = 600.0  # under the sanitizer a kernel takes up to a hundred times as long
EVENTS = 64
Result = TypeVar("Result")


class PlayedRanks:
    """All ranks of a layer, played one after the other.

    Args:
        case: The layer and its tokens; ``inputs`` and delays are not used.
        device: Where they are played.
        record: Record events, too.
    """

    def __init__(self, case: StressCase, device: torch.device, *, record: bool = False) -> None:
        self.case, self.device, self.ranks = case, device, range(case.world_size)
        shape = WorkspaceShape.create(case.config, case.world_size, case.max_tokens, case.dtype)
        self.pools = [Workspace(comm, shape) for comm in emulated_group(case.world_size, device, DEADLINE_S)]
        for pool in self.pools:
            pool.recorder = Recorder.allocate(device, EVENTS) if record else None
        layouts = [ExpertLayout.create(case.config, case.parallel, rank) for rank in self.ranks]
        self.settings = LayerSettings.create(case.config, layouts[0], case.overlap, case.dtype)
        self.inputs = [stress_inputs(case, rank, 0, device) for rank in self.ranks]
        self.weights = FullWeights.draw(case, device)
        shards = [shard_layer(case, rank, self.weights.w1, self.weights.w2) for rank in self.ranks]
        self.w1, self.w2 = [w1.flatten(1, 2) for w1, _ in shards], [w2.contiguous() for _, w2 in shards]
        self.plans = self.plan(layouts)

    def plan(self, layouts: list[ExpertLayout]) -> list[Plan]:
        """The plans of all ranks; all begin before the first finishes."""
        case, block_rows = self.case, self.case.block_rows
        finishes = [
            begin_plan(
                self.inputs[rank].top_k_ids,
                self.inputs[rank].top_k_weights,
                layouts[rank],
                self.pools[rank],
                overlap=case.overlap,
                expert_capacity=case.expert_capacity,
                max_routed_rows=routed_row_capacity(layouts[rank], self.pools[rank].max_tokens, block_rows, None),
                use_kernels=True,
            )
            for rank in self.ranks
        ]
        return [finish() for finish in finishes]

    def twice(self, flags: str, step: Callable[[int], Result]) -> list[Result]:
        """Run a step of all ranks that wait for each other by ``flags``; see the module."""
        for pool in self.pools:
            getattr(pool, flags).local.fill_(int(pool.epoch))
        for _ in range(2):
            for plan in self.plans:
                plan.counters.zero_()
            results = [step(rank) for rank in self.ranks]
        return results

    def barrier(self) -> None:
        """Advance the epoch of all ranks."""
        for pool in self.pools:
            pool.barrier_flags.local.fill_(int(pool.epoch) + 1)
        for pool in self.pools:
            fused.barrier(pool)

    def align(self) -> None:
        """Find how the ranks' clocks differ."""
        for pool in self.pools:
            pool.barrier_flags.local.fill_(int(pool.epoch) + ALIGN_ROUNDS)
        for pool in self.pools:
            align(pool.barrier_flags.pointers, pool.epoch, pool.fault, pool.comm.rank, pool.timeout_ns)

    def forward(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Outputs, and gate | up where there is a backward pass."""
        plans, pools, settings, save = self.plans, self.pools, self.settings, self.case.backward
        layer0 = self.twice(
            "recv_flags",
            lambda r: fused.layer0(self.inputs[r].tokens, self.w1[r], plans[r], pools[r], settings, save_pre=save),
        )
        outputs = self.twice(
            "combine_flags", lambda r: fused.layer1(layer0[r][0], self.w2[r], plans[r], pools[r], settings)
        )
        return outputs, [pre for _, pre in layer0]

    def backward(self, rows: list[Tensor], pre: list[Tensor | None]) -> dict[str, list[Tensor]]:
        """All gradients, from the received rows and gate | up of the forward pass."""
        plans, pools, settings = self.plans, self.pools, self.settings
        self.barrier()
        grad_rows = self.twice(
            "recv_flags", lambda r: fused.dispatch(self.inputs[r].grad_output, plans[r], pools[r], settings)
        )
        hidden = [fused.grad_hidden(grad_rows[r], self.w2[r], plans[r]) for r in self.ranks]
        through = [fused.swiglu_backward(_there(pre[r]), hidden[r], plans[r]) for r in self.ranks]
        homes = self.twice(
            "combine_flags",
            lambda r: fused.grad_tokens(through[r][0], self.w1[r], through[r][2], plans[r], pools[r], settings),
        )
        of_weights = [
            fused.grad_weights(through[r][0], rows[r], through[r][1], grad_rows[r], plans[r]) for r in self.ranks
        ]
        return {
            "grad_tokens": [grad for grad, _ in homes],
            "grad_top_k_weights": [grad for _, grad in homes],
            "grad_w1": [grad for grad, _ in of_weights],
            "grad_w2": [grad for _, grad in of_weights],
        }

    def run(self) -> None:
        """The whole layer, checked."""
        outputs, pre = self.forward()
        found = {"output": outputs}
        if self.case.backward:
            rows = [pool.recv_rows.local.clone() for pool in self.pools]
            for rank, plan in enumerate(self.plans):  # own tokens do not travel in layer 0
                rows[rank][rank * plan.max_tokens :][: plan.num_tokens] = self.inputs[rank].tokens
            found |= self.backward(rows, pre)
        for pool in self.pools:
            pool.check()
        wanted, same = (
            expected(self.case, self.inputs, self.weights, dtype) for dtype in (torch.float64, self.case.dtype)
        )
        for name, parts in found.items():
            vectors = (torch.cat([part.flatten().double() for part in of]) for of in (parts, wanted[name], same[name]))
            assert_as_close(*vectors, self.case.dtype, f"{self.case.name}: {name}")


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "layer 0 kept no gate | up"
    return tensor


def run_layers(device: torch.device, dtype: torch.dtype) -> None:
    """Both placements of the comm blocks, EP, TP, EP x TP and a rank alone, with events and without."""
    hidden_size = 272 if dtype.itemsize == 2 else 80  # two column blocks, hence two panels
    two = StressCase(
        "split, EP2", 2, 1, (35, 5), 4, 2, hidden_size, 64, dtype=dtype, beside=False, routing="zipf",
        capacity_factor=0.1, max_tokens=40, seed=1,
    )  # fmt: skip
    PlayedRanks(two, device).run()
    beside = replace(two, name="beside, TP2", ep=1, tp=2, beside=True, num_tokens=(3, 0), seed=2, capacity_factor=None)
    PlayedRanks(beside, device).run()
    four = replace(two, name="events, EP2 x TP2", tp=2, num_tokens=(3, 0, 1, 2), num_phases=3, backward=False, seed=3)
    played = PlayedRanks(four, device, record=True)
    played.run()
    played.align()
    alone = replace(two, name="alone", ep=1, num_tokens=(9,), num_phases=1, num_experts=3, routing="masked", seed=4)
    PlayedRanks(alone, device).run()


def run_fp8(device: torch.device, dtype: torch.dtype, kind: Kind) -> None:
    """The layer in block FP8, in Triton or in CUDA C++: an expert with several pieces of rows, others with a few."""
    case = StressCase("FP8, EP2", 2, 1, (35, 5), 4, 2, 384, 128, dtype=dtype, backward=False, max_tokens=40, seed=5)
    if kind == "cuda":
        case = replace(case, num_tokens=(150, 5), max_tokens=160, routing="hot", block_rows=128)
    played = PlayedRanks(case, device)
    shards = [(quantize_fp8(w1), quantize_fp8(w2)) for w1, w2 in zip(played.w1, played.w2, strict=True)]
    plans, pools, settings = played.plans, played.pools, played.settings
    with fp8_layer0_in(kind) as in_layer0, fp8_layer1_in(kind) as in_layer1:
        hidden = played.twice(
            "recv_flags",
            lambda r: fused.layer0_fp8(played.inputs[r].tokens, shards[r][0], plans[r], pools[r], settings),
        )
        outputs = played.twice(
            "combine_flags", lambda r: fused.layer1_fp8(hidden[r], shards[r][1], plans[r], pools[r], settings)
        )
    assert in_layer0.call_count == in_layer1.call_count == (2 * case.world_size if kind == "cuda" else 0)
    products = float32_products(case.hidden_size) + (tensor_core_products("cuda") if device.type == "cuda" else 0.0)
    for rank, inputs in enumerate(played.inputs):
        pools[rank].check()
        wanted = layer_of(case, inputs, inputs.top_k_ids, shards, products)
        compare(outputs[rank], wanted, f"{case.name}, {kind}, {dtype}, rank {rank}")


def run_cuda_layer0(dtype: torch.dtype) -> None:
    """Layer 0 in CUDA C++, which no interpreter runs: two ranks, with gate | up and without, and tails of all axes."""
    few = PlayedCase("few", 2, 1, (70, 5), 4, 2, 80, 144, dtype=dtype)
    for case in (few, replace(few, name="masked", num_tokens=(40, 133), num_experts=8, top_k=8, routing="masked")):
        for save_pre in (False, True):
            for exact, found in zip(exact_layer0(case), run_layer0(case, "cuda", save_pre=save_pre), strict=True):
                exact.check(found, case.name)


def run_cuda_layer1(dtype: torch.dtype) -> None:
    """Layer 1 in CUDA C++, which no interpreter runs: two ranks, K of few and of all experts."""
    for case in (
        PlayedCase("few", 2, 1, (70, 5), 4, 2, 288, 80, dtype=dtype),
        PlayedCase("all", 2, 1, (40, 33), 8, 8, 512, 64, dtype=dtype, routing="masked"),
    ):
        for (exact, size), out in zip(exact_layer1(case), run_layer1(case, "cuda"), strict=True):
            assert bool(((out.double() - exact).abs() <= 2 * torch.finfo(dtype).eps * size + 1e-6).all()), case.name


def run_decode(device: torch.device, dtype: torch.dtype) -> None:
    """One rank: every form, and every kind of weights."""
    tiny = DecodeCase(name="fold", T=1, K=2, E=3, D=80, F=48, config=FOLD, held=2)
    check_decode(tiny, dtype, device.type, runs=1)
    check_decode(replace(tiny, name="vector", T=2, config=VECTOR), dtype, device.type, runs=1)
    matrix = replace(tiny, name="matrix", T=3, config=MATRIX, routing="masked")
    check_decode(matrix, dtype, device.type, runs=1)
    wide = replace(tiny, D=160, F=64, config=None)
    for quantised in ("mxfp8", "fp8"):
        for num_tokens in (1, 3):
            case = replace(wide, name=f"{quantised}, {num_tokens} tokens", T=num_tokens, quantised=quantised)
            check_decode(case, dtype, device.type, runs=1)


def run_router(device: torch.device) -> None:
    """The router's kernels, with tails along every axis."""
    check_logits(70, 60, 112, torch.float32, device.type)
    check_top_k(30, 130, 8, device.type)
    check_select(30, dict(num_experts=60, top_k=4, num_groups=4, top_groups=2, balance="bias"), 7, device.type)
    check_measure(130, 60, 4, device.type)


def run_rank_decode(device: torch.device, dtype: torch.dtype, *, replicated: bool) -> None:
    """Two ranks that add up their sums, of the same tokens or of each its own, in two steps."""
    case = DecodeCase(name="two ranks", T=2, K=2, E=4, D=80, F=48, config=MATRIX, seed=6)
    world_size, counts = 2, (2, 1)
    comms = emulated_group(world_size, device, DEADLINE_S)
    decodes = [
        RankDecode(comm, hidden_size=case.D, max_tokens=case.T, replicated=replicated, use_kernels=True)
        for comm in comms
    ]
    weights = [decode_shard(case, rank, world_size, dtype, device) for rank in range(world_size)]
    for step in range(2):
        own = gathered_inputs(case, step, counts, dtype)
        batches = [step_inputs(case, step, case.T, dtype)] * world_size if replicated else own
        for decode in decodes:
            pretend_words(decode)
        # Sums of gathered tokens, and the blocks that add them up, may see tokens of the first run in the second.
        for run in range(2 if replicated else 3):
            if run:
                for decode in decodes:
                    decode.epoch.sub_(1)
            outputs = [
                decode(*(tensor.to(device) for tensor in batch), weight, config=case.config)
                for decode, batch, weight in zip(decodes, batches, weights, strict=True)
            ]
        for rank, (decode, output, batch) in enumerate(zip(decodes, outputs, batches, strict=True)):
            decode.check()
            compare_step(case, output, batch, dtype, f"replicated={replicated}, step {step}, rank {rank}")


def decode_shard(
    case: DecodeCase, rank: int, world_size: int, dtype: torch.dtype, device: torch.device
) -> DecodeWeights:
    """What a rank of EP = ``world_size`` holds."""
    layout = ExpertLayout(num_experts=case.E, top_k=case.K, ep=world_size, tp=1, rank=rank)
    weights = shard(case, layout, dtype, device.type)
    assert torch.equal(weights.slots, rank_slots(layout, device))
    return weights


def pretend_words(decode: RankDecode) -> None:
    """Let all words of the next step look as if they had arrived: zeros of its epoch."""
    epoch = int(decode.epoch) + 1
    for memory in (decode.words, *(() if decode.gather is None else (decode.gather.words,))):
        memory.local[epoch % 2] = epoch << 32


def main(argv: list[str] | None = None) -> int:
    """Run all of it; raises at the first wrong number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), help="one of the two on a GPU (default: both)")
    arguments = parser.parse_args(argv)
    kind, name = arguments.device, arguments.dtype
    device = torch.device(kind, 0 if kind == "cuda" else None)
    on_gpu = (getattr(torch, name),) if name else (torch.bfloat16, torch.float16)
    dtypes = on_gpu if device.type == "cuda" else (torch.float32,)
    for dtype in dtypes:
        run_layers(device, dtype)
        run_fp8(device, dtype, "triton")
        if device.type == "cuda":
            run_fp8(device, dtype, "cuda")
            run_cuda_layer0(dtype)
            run_cuda_layer1(dtype)
        run_decode(device, dtype)
        run_router(device)
        for replicated in (True, False):
            run_rank_decode(device, dtype, replicated=replicated)
        print(f"{dtype}: every kernel ran, all numbers are right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
