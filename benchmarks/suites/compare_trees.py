"""Two trees of this repository in one process: host time, and on a GPU device time, of a call.

    git worktree add outputs/base b0a0273
    python benchmarks/bench.py compare-trees --base outputs/base
    torchrun --nproc-per-node 2 benchmarks/bench.py compare-trees --base outputs/base --ep 2

Both trees run by turns. The figures are medians of the ratios of neighbouring rounds, this tree's over the other's;
``same_bits`` says whether the first results were equal. Without a GPU kernels are not run: the host's time for a call
without its launches remains, over ranks that of decode steps alone.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from comet.config import MoEConfig, ParallelConfig

from lib.ranks import Ranks, start_ranks
from lib.shapes import SIZES, model
from lib.suite import CommandLine, option

HERE = Path(__file__).resolve().parents[2]
LAYERS = ("mixtral_8x7b/4", "phi35_moe/4", "qwen2_moe/4", "qwen3_30b_a3b/4", "deepseek_v3/4")
HEAD_START_CYCLES = 60_000_000  # about 30 ms, so that no call waits for the host


class Tree:
    """One tree's ``comet`` package; ``active`` makes it the one that imports find."""

    def __init__(self, folder: Path) -> None:
        self.root = tempfile.TemporaryDirectory()
        package = Path(self.root.name) / "comet"
        package.mkdir()
        for part in [*(folder / "comet").iterdir(), *(folder / name for name in ("kernels", "launch", "configs"))]:
            (package / part.name).symlink_to(part)
        self.modules: dict[str, ModuleType] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let imports find this tree's modules and no others."""
        installed = take_modules()
        sys.path.insert(0, self.root.name)
        sys.modules.update(self.modules)
        try:
            yield
        finally:
            self.modules = take_modules()
            sys.path.remove(self.root.name)
            sys.modules.update(installed)


def take_modules() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == "comet"]
    return {name: sys.modules.pop(name) for name in names}


def calls_of(shape: MoEConfig, tokens: int, ranks: Ranks, ep: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """The calls that are timed, by name: the active tree's layer of so many tokens, and decode steps of one token."""
    from comet import MoE, MoEConfig, ParallelConfig, make_expert_group
    from comet.decode import DataParallelDecode, DecodeScratch, DecodeWeights, RankDecode
    from comet.decode.ranks import rank_slots
    from comet.layout import RoutedTokens

    class Drawn(MoE):
        def reset_parameters(self, seed: int) -> None:
            """Draw on the device, where it takes no time, the same numbers for both trees."""
            for name, parameter in self.named_parameters():
                torch.manual_seed(sum(name.encode()))
                parameter.data.normal_(std=1.0 if name in ("b1", "b2") else parameter.shape[-1] ** -0.5)

    fields: dict[str, Any] = {size: getattr(shape, size) for size in SIZES}  # the only ones that older trees know
    fields |= {} if shape.activation.name == "swiglu" else {"activation": asdict(shape.activation)}
    fields |= {"expert_bias": True} if shape.expert_bias else {}
    config = MoEConfig(**fields)
    device = ranks.device
    group = make_expert_group(config, ParallelConfig(ep=ep), max_tokens=tokens, dtype=dtype, device=device)
    moe = Drawn(config, group, path="fused", param_dtype=dtype)
    torch.manual_seed(0)
    x = torch.randn(tokens, config.hidden_size, device=device, dtype=dtype)
    with torch.no_grad():
        routing = moe.router(x)
    routed = (routing.top_k_ids, routing.top_k_weights.detach())

    def backward() -> Tensor | None:
        moe.routed_experts(x, *routed).backward(x)
        return moe.w1.grad

    calls: dict[str, Callable[[], Any]] = {
        "layer": torch.no_grad()(lambda: moe(x)[0]),
        "routed experts": torch.no_grad()(lambda: moe.routed_experts(x, *routed)),
        "routed experts, with backward": backward,
    }
    if ep > 1 and device.type == "cpu":
        calls.clear()  # they wait for rows of other ranks
    if set(fields) > set(SIZES):
        return calls
    w1, w2 = moe.expert_weights()
    weights = DecodeWeights(w1=w1.flatten(1, 2), w2=w2, slots=rank_slots(group.layout(config), device))
    decode = RankDecode(group.comm, hidden_size=config.hidden_size, use_kernels=True)
    scratch = DecodeScratch.create(weights, config.top_k, dtype, max_tokens=1)
    own = DataParallelDecode(config, group, 1)
    assert isinstance(own.decode_on_ranks, RankDecode), "one node, and experts that are wide enough"
    own.decode_on_ranks.use_kernels = True
    for each in (decode, own.decode_on_ranks) if device.type == "cpu" else ():
        setattr(each, "check", lambda: None)  # noqa: B010 - on a GPU no step looks whether others were late
    token = RoutedTokens(*(each[:1].contiguous() for each in (x, *routed)))
    return calls | {
        "decode step": lambda: decode(*token, weights, scratch=scratch),
        "decode step of own tokens": torch.no_grad()(lambda: own(token, w1.flatten(1, 2), w2)),
        "the same, told how many": torch.no_grad()(lambda: own(token, w1.flatten(1, 2), w2, most_tokens=1)),
    }


def measure(call: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Microseconds of the host and of the device for a call."""
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(100):
            call()
        return (time.perf_counter() - start) * 1e4, float("nan")
    torch.cuda.synchronize()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(HEAD_START_CYCLES)
    first.record()
    start = time.perf_counter()
    for _ in range(10):
        call()
    host = (time.perf_counter() - start) * 1e5
    last.record()
    torch.cuda.synchronize()
    return host, first.elapsed_time(last) * 1e2


def compare(name: str, pair: list[Callable[[], Any]], trees: list[Tree], device: torch.device, rounds: int) -> dict:
    first, found = [], []
    for tree, call in zip(trees, pair, strict=True):
        with tree.active():
            first.append(call())
    for turn in range(rounds + 1):
        times = [(0.0, 0.0)] * 2
        for which in (0, 1) if turn % 2 else (1, 0):
            with trees[which].active():
                times[which] = measure(pair[which], device)
        found += [times] if turn else []  # the first compiles
    row: dict[str, Any] = {"call": name}
    for part, where in enumerate(("host", "device") if device.type == "cuda" else ("host",)):
        ours, theirs = ([times[which][part] for times in found] for which in (0, 1))
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        medians = (round(statistics.median(times), 2) for times in (ours, theirs))
        row[where] = dict(zip(("us", "base_us"), medians, strict=True)) | {"ratio": round(ratio, 4)}
    if all(isinstance(result, Tensor) for result in first):
        row["same_bits"] = torch.equal(first[0], first[1])
    return row


@dataclass(frozen=True, kw_only=True)
class Run(CommandLine):
    base: Path
    models: tuple[str, ...] = LAYERS if torch.cuda.is_available() else ("tiny",)
    ep: int = option(1, "ranks, started by torchrun")
    tokens: tuple[int, ...] = (2048, 8192) if torch.cuda.is_available() else (128,)
    rounds: int = option(30, "times each tree has its turn")

    @classmethod
    def main(cls, command_line: Sequence[str]) -> None:
        options = cls.parse(command_line)
        start_ranks(ParallelConfig(ep=options.ep), "auto", options.run)

    def run(self, ranks: Ranks) -> None:
        device, dtype = ranks.device, torch.bfloat16
        if device.type == "cpu":
            dtype = torch.float16
            torch.set_num_threads(1)
            triton.knobs.runtime.interpret = True
            InterpretedFunction.run = InterpretedFunction.__call__ = lambda *_, **__: None
        trees, rows = [Tree(HERE), Tree(self.base.resolve())], []
        for name, tokens in itertools.product(self.models, self.tokens):
            pairs = []
            for tree in trees:
                with tree.active():
                    pairs.append(calls_of(model(name), tokens, ranks, self.ep, dtype))
            for call in pairs[0]:
                rows.append(compare(call, [pair[call] for pair in pairs], trees, device, self.rounds))
                rows[-1]["call"] = f"{name}, {tokens} tokens: {call}"
                if ranks.rank == 0:
                    print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
            del pairs
        if ranks.rank == 0:
            print(json.dumps({"task": "compare_trees", "device": str(device), "rows": rows}))
