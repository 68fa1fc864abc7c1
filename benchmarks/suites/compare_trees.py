"""Two trees of this repository in one process: host time, and on a GPU device time, of a call.

``python benchmarks/bench.py compare-trees --base FOLDER`` takes another commit from a folder (``git worktree add FOLDER
b0a0273``) and runs both by turns. The figures are medians of the ratios of neighbouring rounds, this tree's over the
other's; ``same_bits`` says whether the first results were equal. Without a GPU kernels are not run: what remains is
what the host does for a call but for the launches.
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
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from comet.config import MoEConfig

from lib.arguments import suite_parser
from lib.shapes import SIZES, model

HERE = Path(__file__).resolve().parents[2]
LAYERS = ("mixtral_8x7b/4", "phi35_moe/4", "qwen2_moe/4", "qwen3_30b_a3b/4", "deepseek_v3/4")
DECODED = ("tiny", "mixtral_8x7b/4", "qwen3_30b_a3b/4")
DECODE_TOKENS = 1


class Tree:
    """One tree's ``comet`` package; ``active`` makes it the one that imports find."""

    def __init__(self, folder: Path) -> None:
        self.root = tempfile.TemporaryDirectory()
        package = Path(self.root.name) / "comet"
        package.mkdir()
        parts = [*(folder / "comet").iterdir(), *(folder / name for name in ("kernels", "launch", "configs"))]
        for part in parts:
            (package / part.name).symlink_to(part)
        self.modules: dict[str, ModuleType] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Imports find this tree's modules and no others."""
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
    """The modules of ``comet`` that are imported, which are no longer so."""
    names = [name for name in sys.modules if name.partition(".")[0] == "comet"]
    return {name: sys.modules.pop(name) for name in names}


def fields_of(shape: MoEConfig) -> dict[str, Any]:
    """A layer's fields for any tree's ``MoEConfig``: an older one knows sizes alone."""
    found: dict[str, Any] = {size: getattr(shape, size) for size in SIZES}
    if shape.activation.name != "swiglu":
        found["activation"] = asdict(shape.activation)
    return found | ({"expert_bias": True} if shape.expert_bias else {})


def layer_calls(
    shape: MoEConfig, tokens: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Callable[[], Any]]:
    """What is timed, by name, on the active tree's layer of so many tokens."""
    from comet import MoE, MoEConfig, ParallelConfig, make_expert_group

    class Drawn(MoE):
        def reset_parameters(self, seed: int) -> None:
            """On the device: on the host, billions of numbers take longer than a run."""
            for name, parameter in self.named_parameters():
                torch.manual_seed(sum(name.encode()))  # both trees alike
                parameter.data.normal_(std=1.0 if name in ("b1", "b2") else parameter.shape[-1] ** -0.5)

    config = MoEConfig(**fields_of(shape))
    group = make_expert_group(config, ParallelConfig(), max_tokens=tokens, dtype=dtype, device=device)
    moe = Drawn(config, group, path="fused", param_dtype=dtype)
    torch.manual_seed(0)
    x = torch.randn(tokens, config.hidden_size, device=device, dtype=dtype)
    with torch.no_grad():
        routing = moe.router(x)
    routed = (routing.top_k_ids, routing.top_k_weights.detach())

    def forward() -> Tensor:
        with torch.no_grad():
            return moe.routed_experts(x, *routed)

    def layer() -> Tensor:
        with torch.no_grad():
            return moe(x)[0]

    def backward() -> Tensor | None:
        moe.routed_experts(x, *routed).backward(x)
        return moe.w1.grad

    return {"layer": layer, "routed experts": forward, "routed experts, with backward": backward}


def decode_calls(shape: MoEConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """A decode step of the active tree on its layer's weights."""
    from comet import MoEConfig, ParallelConfig, make_expert_group
    from comet.decode import DecodeScratch, DecodeWeights, RankDecode

    config = MoEConfig(**fields_of(shape))
    hidden, ffn, experts, top_k = config.hidden_size, config.ffn_size, config.num_experts, config.top_k
    group = make_expert_group(config, ParallelConfig(), max_tokens=DECODE_TOKENS, dtype=dtype, device=device)
    torch.manual_seed(0)
    made: dict[str, Any] = dict(device=device, dtype=dtype)
    weights = DecodeWeights(
        w1=torch.randn(experts, 2 * ffn, hidden, **made) / 64, w2=torch.randn(experts, hidden, ffn, **made) / 64,
        slots=torch.arange(experts, dtype=torch.int32, device=device),
    )  # fmt: skip
    decode = RankDecode(group.comm, hidden_size=hidden, use_kernels=True)
    scratch = DecodeScratch.create(weights, top_k, dtype, max_tokens=DECODE_TOKENS)
    if device.type == "cpu":
        setattr(decode, "check", lambda: None)  # noqa: B010 - on a GPU no step looks whether others were late
    ids = torch.arange(top_k, dtype=torch.int32, device=device).expand(DECODE_TOKENS, -1).contiguous()
    few = torch.randn(DECODE_TOKENS, hidden, **made), ids, torch.full(ids.shape, 1 / top_k, device=device)
    return {"decode step": lambda: decode(*few, weights, scratch=scratch)}


def training_step(device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
    """A step of the active tree's ``comet train`` on its default model, on one rank."""
    from comet import make_expert_group
    from comet.launch.config import compose, make_job
    from comet.models.gpt import GPT

    job = make_job(compose(["parallel=single"]), 1)
    tokens = job.train.batch_size * job.model.context
    group = make_expert_group(job.model.moe, job.parallel, max_tokens=tokens, dtype=dtype, device=device)
    model = GPT(job.model, group)
    text = torch.randint(256, (2**20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    steps = itertools.cycle(range(job.train.steps))
    from comet.training.optimizer import make_optimizer
    from comet.training.step import TrainStep

    train_step = TrainStep(model, make_optimizer(model, job.train), group, text, job.train)
    return lambda: train_step(next(steps))


def measure(call: Callable[[], Any], count: int, device: torch.device) -> tuple[float, float]:
    """Microseconds of the host and of the device for a call, over ``count`` calls."""
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count * 1e6, float("nan")
    torch.cuda.synchronize()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(60_000_000)  # about 30 ms, so that no call waits for the host
    first.record()
    start = time.perf_counter()
    for _ in range(count):
        call()
    host = (time.perf_counter() - start) / count * 1e6
    last.record()
    torch.cuda.synchronize()
    return host, first.elapsed_time(last) / count * 1e3


def compare(name: str, pair: list[Callable[[], Any]], trees: list[Tree], device: torch.device, rounds: int) -> dict:
    """Medians of both trees' times, and of the ratios of neighbouring rounds."""
    count = 10 if device.type == "cuda" else 100
    first = []
    for tree, call in zip(trees, pair, strict=True):
        with tree.active():
            first.append(call())
    found: list[list[tuple[float, float]]] = []
    for turn in range(rounds + 1):
        order = (0, 1) if turn % 2 else (1, 0)
        times = [(0.0, 0.0)] * 2
        for which in order:
            with trees[which].active():
                times[which] = measure(pair[which], count, device)
        if turn:  # the first compiles
            found.append(times)

    def figures(part: int) -> dict[str, float]:
        ours, theirs = ([times[which][part] for times in found] for which in (0, 1))
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        return {"us": round(statistics.median(ours), 2), "base_us": round(statistics.median(theirs), 2),
                "ratio": round(ratio, 4)}  # fmt: skip

    row: dict[str, Any] = {"call": name, "host": figures(0)}
    if all(isinstance(result, Tensor) for result in first):
        row["same_bits"] = torch.equal(first[0], first[1])
    if device.type == "cuda":
        row["device"] = figures(1)
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def main(command_line: Sequence[str]) -> None:
    """Compare, print a line for each call, and all of them as JSON."""
    on_gpu = torch.cuda.is_available()
    defaults = dict(models=LAYERS, tokens=[2048, 8192]) if on_gpu else dict(models=("tiny",), tokens=[128])
    parser = suite_parser("compare-trees", __doc__, **defaults)
    parser.add_argument("--base", type=Path, required=True, help="folder with the other tree")
    parser.add_argument("--rounds", type=int, default=30, help="times each tree has its turn")
    options = parser.parse_args(command_line)
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
        triton.knobs.runtime.interpret = True
        InterpretedFunction.run = InterpretedFunction.__call__ = lambda *_, **__: None
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    trees, rows = [Tree(HERE), Tree(options.base.resolve())], []
    makers: dict[str, Callable[[], dict[str, Callable[[], Any]]]] = {}
    for name in options.models:
        makers |= {f"{name}, {tokens} tokens": partial(layer_calls, model(name), tokens, device, dtype)
                   for tokens in options.tokens}  # fmt: skip
        if name in DECODED:
            makers[name] = partial(decode_calls, model(name), device, dtype)
    for label, make in makers.items():
        pairs = []
        for tree in trees:
            with tree.active():
                pairs.append(make())
        rows += [compare(f"{label}: {name}", [pair[name] for pair in pairs], trees, device, options.rounds)
                 for name in pairs[0]]  # fmt: skip
        del pairs
    if device.type == "cuda":
        steps = []
        try:
            for tree in trees:
                with tree.active():
                    steps.append(training_step(device, dtype))
        except ModuleNotFoundError as error:  # of an older tree
            print(f"training step  not compared: {error}", flush=True)
        else:
            rows.append(compare("training step", steps, trees, device, options.rounds))
    print(json.dumps({"task": "compare_trees", "device": str(device), "rows": rows}))
