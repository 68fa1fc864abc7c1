"""Launch every kernel on small cases, on one GPU and in one process, for compute-sanitizer.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 python tests/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize.py

``--report-api-errors no``, because ``cuda.bindings`` asks the driver for functions that it may not have. Every part
takes a minute or more; ``--dtype`` and ``--parts`` choose, so that several processes can share the work.

The process plays all ranks (``emulated_group``), one after the other, every step that waits twice
(``emulated_layer``). On a CPU it runs under the interpreter (``TRITON_INTERPRET=1``).
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import support  # noqa: F401 - puts the helpers on the import path
import torch
from activation_cases import ACTIVATIONS
from cache_cases import cache_of, check_slots, hosted_cache
from decode_cases import (
    FOLD,
    MATRIX,
    SLOT_SIZES,
    VECTOR,
    DecodeCase,
    check_decode,
    check_dequantize,
    check_rows_in_turn,
)
from decode_ranks import compare_step, gathered_inputs, shard, step_inputs
from emulated import emulated_group
from emulated_layer import DEADLINE_S, EmulatedCase, EmulatedRanks
from gemm_cases import check_biases, check_wgrad_cuda, make_rows
from kinds import Kind, layer0_in, layer1_in
from layer_cases import LayerCase
from layer_ranks import run_case
from leg_cases import COLUMNS, MOST, make_legs
from router_kernel_cases import check_logits, check_measure, check_select, check_top_k

from comet.decode import DecodeWeights, RankDecode, warp_decode_torch
from comet.decode.local import run_kernels
from comet.experts.cache import ExpertCache
from comet.kernels.experts.prefetch import plan, travel
from comet.kernels.network.legs import Message, SendLists
from comet.kernels.network.listing import list_tokens
from comet.kernels.network.put import put
from comet.kernels.network.put_cuda import put_cuda
from comet.kernels.network.receive import add_nodes, receive
from comet.kernels.runtime.activation import Activation
from comet.layout import ExpertLayout


def run_layers(device: torch.device, dtype: torch.dtype) -> None:
    """Both placements of the comm blocks, EP, TP, EP x TP and a rank alone, with events and without."""
    hidden_size = 272 if dtype.itemsize == 2 else 80  # two column blocks, hence two panels
    two = LayerCase(
        "split, EP2", 2, 1, (35, 5), 4, 2, hidden_size, 64, dtype=dtype, comm_blocks=2, routing="zipf",
        capacity_factor=0.1, max_tokens=40, seed=1,
    )  # fmt: skip
    EmulatedRanks(two, device).run()
    tp = replace(two, name="colocated, TP2", ep=1, tp=2, comm_blocks=0, num_tokens=(3, 0), seed=2, capacity_factor=None)
    EmulatedRanks(tp, device).run()
    four = replace(two, name="events, EP2 x TP2", tp=2, num_tokens=(3, 0, 1, 2), backward=False, seed=3)
    emulated = EmulatedRanks(four, device, record=True)
    emulated.run()
    emulated.align()
    alone = replace(two, name="alone", ep=1, num_tokens=(9,), num_experts=3, routing="masked", seed=4)
    EmulatedRanks(alone, device).run()
    parts = replace(alone, name="panels in parts", hidden_size=1040 if dtype.itemsize == 2 else 528, comm_blocks=0)
    EmulatedRanks(parts, device).run()


def run_fp8(device: torch.device, dtype: torch.dtype, kind: Kind, *, bias: torch.dtype | None = None) -> None:
    """The layer in block FP8, in Triton or in CUDA C++: an expert with several pieces of rows, others with a few."""
    case = EmulatedCase("FP8, EP2", 2, 1, (35, 5), 4, 2, 384, 128, dtype=dtype, seed=5, fp8=True, bias=bias)
    if kind == "cuda":
        case = replace(case, num_tokens=(150, 5), routing="hot")
    ranks = EmulatedRanks(case, device)
    if bias is not None:  # Plain torch has no biases here.
        ranks.results(kind)
        return
    ranks.run(kind)


def run_cuda_layers(device: torch.device, dtype: torch.dtype) -> None:
    """Both layers and all gradients in CUDA C++, which no interpreter runs: two ranks, and tails of all axes."""
    few = EmulatedCase("few", 2, 1, (70, 5), 4, 2, 288, 144, dtype=dtype)
    masked = replace(few, name="masked", num_tokens=(40, 133), num_experts=8, top_k=8, hidden_size=80, routing="masked")
    every = replace(masked, name="all", num_tokens=(40, 33), num_experts=12, top_k=12, hidden_size=512, ffn_size=64)
    cases = (few, masked, replace(masked, name="split", comm_blocks=2), every)
    for case, backward in product(cases, (False, True)):
        EmulatedRanks(replace(case, backward=backward), device).run("cuda")


def run_cuda_wgrad(device: torch.device, dtype: torch.dtype) -> None:
    """Gradients of weights by fewer blocks than tiles; padding is NaN."""
    check_wgrad_cuda([0, 1, 70, 33, 0, 16], (144, 272), dtype, max_blocks=5)


def run_decode(device: torch.device, dtype: torch.dtype) -> None:
    """One rank: every form, and every kind of weights."""
    tiny = DecodeCase(name="fold", T=1, K=2, E=3, D=80, F=48, config=FOLD, held=2)
    check_decode(tiny, dtype, device.type, runs=1)
    check_decode(replace(tiny, name="vector", T=2, config=VECTOR), dtype, device.type, runs=1)
    matrix = replace(tiny, name="matrix", T=3, config=MATRIX, routing="masked")
    check_decode(matrix, dtype, device.type, runs=1)
    for case in (tiny, matrix):
        check_rows_in_turn(case, dtype, device.type)
    wide = replace(tiny, D=160, F=64, config=None)
    for quantised in ("mxfp8", "fp8", "mxfp4"):
        for num_tokens in (1, 3):
            case = replace(wide, name=f"{quantised}, {num_tokens} tokens", T=num_tokens, quantised=quantised)
            check_decode(case, dtype, device.type, runs=1)
            if quantised != "fp8":
                check_rows_in_turn(case, dtype, device.type)


def run_biases(device: torch.device, dtype: torch.dtype) -> None:
    """gpt-oss's activation and biases: decode, a layer forward and backward, in block FP8, the biases' gradients."""
    activation = Activation("clamped_swiglu")
    tiny = DecodeCase(name="biases", T=1, K=2, E=3, D=80, F=48, held=2, config=FOLD, activation=activation, biased=True)
    for num_tokens, config in ((1, FOLD), (2, VECTOR), (3, MATRIX)):
        check_decode(replace(tiny, T=num_tokens, config=config), dtype, device.type, runs=1)
    kinds: tuple[Kind, ...] = ("triton", "cuda") if device.type == "cuda" else ("triton",)
    case = LayerCase("biases", 1, 1, (11,), ffn_size=48, routing="masked", dtype=dtype, expert_bias=True)
    for kind, gated in product(kinds, ACTIVATIONS):
        with layer0_in(kind), layer1_in(kind):
            run_case(0, 1, replace(case, activation=gated), "fused", device.type)
    for kind in kinds:
        run_fp8(device, dtype, kind, bias=dtype)
    rows = make_rows([[0, 1, 70, 33]], 128, device.type, 1)
    check_biases(rows, 80, dtype, 1, device.type)


def run_expert_caches(device: torch.device, dtype: torch.dtype) -> None:
    """Slots are filled, kept and given away, with biases and with scales: in block FP8 12 bytes of w1 and 8 of w2."""
    case = DecodeCase(name="cache", T=1, K=2, E=6, D=32, F=16)
    biased = replace(case, biased=True)
    caches = [(biased, 1, 2, 4), (case, 3, 6, 4), (biased, 2, 3, 4)]
    for kind, (hidden_size, ffn_size) in {"mxfp8": (64, 32), "mxfp4": (64, 32), "fp8": (48, 144)}.items():
        quantised = replace(case, quantised=kind, D=hidden_size, F=ffn_size)
        caches += [(quantised, 1, 2, 2), (quantised, 3, 6, 1)]  # fewer steps, which take longer
    for each, num_tokens, num_slots, num_steps in caches:
        cache = cache_of(each, num_slots, device=device, dtype=dtype)
        for needed in ([0, 5], [5, 2], [1, 4], [1, -1])[:num_steps]:
            step_from_cache(cache, needed, dtype, num_tokens)


def step_from_cache(cache: ExpertCache, needed: list[int], dtype: torch.dtype, num_tokens: int = 1) -> None:
    """A step of tokens that need these experts, which then have slots; all slots hold what the host has."""
    device = cache.weights.w1.device
    ids = torch.tensor([needed] * num_tokens, dtype=torch.int32, device=device)
    tokens = torch.randn(num_tokens, cache.weights.hidden_size, device=device).to(dtype)
    run_kernels(tokens, ids, torch.rand(ids.shape, device=device), cache.weights)
    assert all(cache.tables.slots[expert] >= 0 for expert in needed if expert >= 0)
    check_slots(cache)


def run_expert_prefetch(device: torch.device, dtype: torch.dtype) -> None:
    """A plan travels, and a step takes over what came."""
    cache = cache_of(DecodeCase(name="guessed", T=1, K=2, E=6, D=32, F=16), 3, device=device, dtype=dtype)
    cache.expect_prefetch()
    for guessed, needed in (([0, 5], [0, 5]), ([1, 2], [5, 2]), ([4, 3], [1, 0])):
        plan(torch.tensor([guessed], dtype=torch.int32, device=device), cache.weights.parts, cache.host)
        travel(cache.weights.parts, cache.host)
        step_from_cache(cache, needed, dtype)


def run_dequantize(device: torch.device, dtype: torch.dtype) -> None:
    """Slots of every kind, of less than a block, and of several and a part of one."""
    for kind, sizes in SLOT_SIZES.items():
        for rows, columns in sizes[:2]:
            check_dequantize(kind, rows, columns, dtype, device)


def run_host_cores(device: torch.device, dtype: torch.dtype) -> None:
    """Some of the missing experts are computed by a process of the host, where a step is one wave."""
    for num_slots, kind in ((6, ""), (3, ""), (3, "mxfp4")):
        case = DecodeCase(name="host cores", T=3, K=2, E=6, D=32, F=32, quantised=kind)
        cache, cores = hosted_cache(case, num_slots, device=device, dtype=dtype)
        slots = torch.arange(6, dtype=torch.int32)
        resident = DecodeWeights(**{name: part.cpu() for name, part in cache.host.named_parts.items()}, slots=slots)
        for num_tokens, needed in product((1, 3), ([0, 5], [2, 3], [4, 5], [1, -1])):
            ids = torch.tensor([needed] * num_tokens, dtype=torch.int32, device=device)
            tokens, weights = torch.randn(num_tokens, 32, device=device).to(dtype), torch.rand(ids.shape, device=device)
            output = run_kernels(tokens, ids, weights, cache.weights)
            expected = warp_decode_torch(tokens.cpu(), ids.cpu(), weights.cpu(), resident)
            torch.testing.assert_close(output.cpu(), expected, rtol=2e-2, atol=2e-1)
        cores.check()
        assert cores.counts[0] > 0
        cores.close()


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
    layouts = [ExpertLayout(num_experts=4, top_k=2, ep=world_size, tp=1, rank=rank) for rank in range(world_size)]
    weights = [shard(case, layout, dtype, device.type) for layout in layouts]
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


def pretend_words(decode: RankDecode) -> None:
    """Let all words of the next step look as if they had arrived: zeros of its epoch."""
    epoch = int(decode.epoch) + 1
    for memory in (decode.words, *(() if decode.gather is None else (decode.gather.words,))):
        memory.local[epoch % 2] = epoch << 32


def run_rank_decodes(device: torch.device, dtype: torch.dtype) -> None:
    """Decode the same tokens on all ranks, and each rank's own."""
    for replicated in (True, False):
        run_rank_decode(device, dtype, replicated=replicated)


def run_network(device: torch.device, dtype: torch.dtype) -> None:
    """Tokens of one node travel to another one in the same process, and twice each comes home."""
    ints = dict(dtype=torch.int32, device=device)
    x, ids = torch.randn(130, COLUMNS, device=device).to(dtype), torch.randint(-1, 4, (130, 2), **ints)
    tokens, counts, number = torch.zeros(1, MOST, **ints), torch.zeros(1, **ints), torch.zeros(1, **ints)
    words = torch.zeros(1, MOST, 4, **ints)
    one, chunks = range(1), range(2)
    for put_rows in (put, put_cuda) if device.type == "cuda" else (put,):
        (out, there), (home, back) = (
            make_legs(2, 2, is_home=is_home, dtype=dtype, device=device) for is_home in (False, True)
        )
        lists = SendLists(tokens, torch.zeros_like(tokens), counts, words)
        list_tokens(ids, torch.rand(130, 2, device=device), lists, 0, 2, out.shape)
        sent = Message(
            x=x, tokens=lists.tokens, words=lists.words, counts=counts, number=number, call=16, slots=one,
            chunks=chunks, has_words=True,
        )  # fmt: skip
        put_rows(out, sent)
        routing = torch.empty(MOST, 2, **ints), torch.empty(MOST, 2, device=device)
        receive(there, counts, number, 16, one, chunks, routing)
        every, none = torch.arange(MOST, **ints), torch.zeros(MOST, 0, **ints)
        put_rows(back, replace(sent, x=2 * there.rows[0], tokens=every, words=none))
        receive(home, torch.zeros_like(counts), number, 16, one, chunks)
        travels = (ids >= 2).any(1)
        assert int(counts) == int(travels.sum())
        added = add_nodes(x, None, home.rows, lists.places, home.shape, 0, range(2))
        torch.testing.assert_close(added, torch.where(travels[:, None], 3 * x, x), rtol=2e-2, atol=2e-2)
        assert not any(leg.fault.any() for leg in (out, there, home, back))


# Each with whether it needs a GPU.
PARTS: dict[str, tuple[Callable[[torch.device, torch.dtype], None], bool]] = {
    "layers": (run_layers, False),
    "fp8": (partial(run_fp8, kind="triton"), False),
    "fp8_cuda": (partial(run_fp8, kind="cuda"), True),
    "layers_cuda": (run_cuda_layers, True),
    "wgrad_cuda": (run_cuda_wgrad, True),
    "decode": (run_decode, False),
    "biases": (run_biases, False),
    "expert_cache": (run_expert_caches, False),
    "expert_prefetch": (run_expert_prefetch, False),
    "dequantize": (run_dequantize, False),
    "host_cores": (run_host_cores, False),
    "router": (lambda device, dtype: run_router(device), False),
    "rank_decode": (run_rank_decodes, False),
    "network": (run_network, False),
}


def main(argv: list[str] | None = None) -> int:
    """Run all of it; raises at the first wrong number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), help="one of the two on a GPU (default: both)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="only these (default: all that run on the device)")
    arguments = parser.parse_args(argv)
    kind, name = arguments.device, arguments.dtype
    device = torch.device(kind, 0 if kind == "cuda" else None)
    halves = (getattr(torch, name),) if name else (torch.bfloat16, torch.float16)
    dtypes = halves if device.type == "cuda" else (torch.float32,)
    parts = arguments.parts or [part for part, (_, on_gpu) in PARTS.items() if kind == "cuda" or not on_gpu]
    for part in parts:
        if PARTS[part][1] and kind != "cuda":
            parser.error(f"{part} runs on a GPU only")
    for dtype, part in product(dtypes, parts):
        begin = time.monotonic()
        PARTS[part][0](device, dtype)
        print(f"{dtype}, {part}: all numbers are right, {time.monotonic() - begin:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
