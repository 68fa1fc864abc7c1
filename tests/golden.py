"""Golden numbers: outputs and gradients of layers, decode steps and a training run, which no move of code changes.

    TRITON_INTERPRET=1 python tests/golden.py [--write] [--bits] [--device cuda]

compares with ``golden.json`` what this tree computes, and with ``--write`` records it; a kind of GPU has entries of its
own. Of a tensor two numbers are kept, its norm and its product with a fixed vector, which have to agree to 1e-4, and in
16 bits to 5e-3, for another machine sums in another order; and a hash, which ``--bits`` compares: for two trees on one
machine.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import support  # noqa: F401 - puts the helpers on the import path
import torch
from torch import Tensor
from training_cases import MODEL, MOE, Rank, make_job, slots_of

from comet import MoE, MoEConfig, ParallelConfig, make_expert_group
from comet.generation.engine import GPTEngine
from comet.models.gpt import GPT
from comet.training.trainer import train

FILE = Path(__file__).with_name("golden.json")
TOLERANCE, TOLERANCE_16 = 1e-4, 5e-3
SMALL = MoEConfig(hidden_size=64, ffn_size=32, num_experts=8, top_k=3)
LARGE = MoEConfig(hidden_size=1024, ffn_size=768, num_experts=32, top_k=4)
# Kinds of layers: each a change of SMALL or LARGE.
KINDS: dict[str, dict[str, object]] = {
    "softmax": {}, "shared": dict(shared_ffn_size=32), "sigmoid": dict(score="sigmoid", num_groups=4, top_groups=2),
}  # fmt: skip
CPU_CASES = [("reference", "float32"), ("plain", "float32"), ("plain", "bfloat16"), ("twin", "float32"),
             ("twin", "bfloat16"), ("fused", "float32"), ("fused", "float16")]  # fmt: skip
GPU_CASES = [(path, dtype) for path in ("plain", "fused") for dtype in ("float32", "bfloat16", "float16")]


def layers(device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Output, loss and gradients of one rank's layers."""
    on_gpu = device.type == "cuda"
    config, num_tokens = (LARGE, 2048) if on_gpu else (SMALL, 40)
    for (path, kind), (name, changes) in product(GPU_CASES if on_gpu else CPU_CASES, KINDS.items()):
        dtype = getattr(torch, kind)
        of_case = replace(config, **changes)
        group = make_expert_group(of_case, ParallelConfig(), max_tokens=num_tokens, dtype=dtype, device=device)
        layer = MoE(of_case, group, path=path, seed=3)
        made = torch.Generator().manual_seed(5)
        tokens = torch.randn(num_tokens, config.hidden_size, generator=made).to(device, dtype).requires_grad_()
        output, stats = layer(tokens)
        (output.float().square().mean() + stats.loss).backward()
        group.workspace.check()
        case = f"layer/{path}/{kind}/{name}"
        yield f"{case}/output", output
        yield f"{case}/loss", stats.loss
        yield f"{case}/grad tokens", tokens.grad
        for parameter, value in layer.named_parameters():
            yield f"{case}/grad {parameter}", value.grad
        group.close()


def decode_steps(device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Logits of two prompts and of six tokens behind them, with all experts on the device and with half of them."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = replace(MODEL, moe=replace(MOE, shared_ffn_size=16))
    for slots in (None, 2):
        group = make_expert_group(model.moe, ParallelConfig(), max_tokens=64, dtype=dtype, device=device)
        gpt = GPT(model, group, seed=1, expert_device=None if slots is None else torch.device("cpu"))
        gpt.head.weight.data.copy_(torch.randn(gpt.head.weight.shape, generator=torch.Generator().manual_seed(2)))
        engine = GPTEngine(gpt, group, store=slots_of(slots))
        ids = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(4)).to(device)
        yield f"decode/{slots}/prompt", engine.prefill(ids, torch.tensor([20, 9], device=device), 30)
        for step in range(6):
            yield f"decode/{slots}/step {step}", engine.decode(ids[:, step])
        group.close()


def training(device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The held-out loss behind a training run."""
    with tempfile.TemporaryDirectory() as folder:
        result = train(make_job(Path(folder), steps=8), Rank(device=device))
    yield "train/heldout", torch.tensor(result["heldout_nats_per_byte"], dtype=torch.float64)


def golden(device: torch.device) -> dict[str, list[float | str]]:
    """Norm, product and hash of everything."""
    found: dict[str, list[float | str]] = {}
    for part in (layers, decode_steps, training):
        for name, value in part(device):
            flat = value.detach().cpu().flatten().contiguous()
            fixed = torch.randn(flat.numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            wide = flat.double()
            bits = hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
            found[name] = [wide.norm().item(), wide.dot(fixed).item(), bits]
    return found


def differences(found: dict[str, list], kept: dict[str, list], *, bits: bool) -> list[str]:
    """Return a line for each value that differs from the recorded one."""
    lines = [f"{name}: {'is new' if name in found else 'is gone'}" for name in sorted(found.keys() ^ kept.keys())]
    for name in sorted(found.keys() & kept.keys()):
        (norm, along, code), (kept_norm, kept_along, kept_code) = found[name], kept[name]
        limit = (TOLERANCE_16 if "float16/" in name else TOLERANCE) * max(abs(kept_norm), 1e-30)
        if not (abs(norm - kept_norm) <= limit and abs(along - kept_along) <= limit):
            lines.append(f"{name}: norm {norm} and product {along}, recorded {kept_norm} and {kept_along}")
        elif bits and code != kept_code:
            lines.append(f"{name}: other bits")
    return lines


def main() -> int:
    """Compare or record; 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record what this tree computes")
    parser.add_argument("--bits", action="store_true", help="the bits have to agree: for two trees on one machine")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    place = torch.cuda.get_device_name() if arguments.device.type == "cuda" else "cpu"
    found = golden(arguments.device)
    recorded = json.loads(FILE.read_text()) if FILE.exists() else {}
    if arguments.write:
        rows = [f"{json.dumps(name)}: {{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in
                entries.items()) + "\n}" for name, entries in sorted((recorded | {place: found}).items())]  # fmt: skip
        FILE.write_text("{" + ",\n".join(rows) + "}\n")
        return 0
    lines = differences(found, recorded.get(place, {}), bits=arguments.bits)
    print("\n".join([*lines, f"{len(found)} tensors on {place}, {len(lines)} differ"]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
