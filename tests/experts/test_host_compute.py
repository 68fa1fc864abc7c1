"""Missing experts computed on the host's cores, by the real process: engines, faults, settings."""

from __future__ import annotations

import gc
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import pytest
import torch
from activation_cases import ACTIVATIONS, NAMES, on_paper
from cache_cases import CASE, CPU, DEADLINE_S, PROFILE, SLOW_LINK, hosted_cache, leave_all_to, set_deadline
from decode_cases import E2M1, QUANTISERS
from launch_jobs import all_gone
from ranks import in_ranks, run_ranks
from tiers import slow
from training_cases import (
    MODEL,
    MOE,
    Rank,
    awake_model,
    compare_texts,
    make_generation,
    make_group,
    make_job,
    nearly_equal,
    slots_of,
)

from comet.decode.twin import warp_decode_torch
from comet.errors import HostComputeError
from comet.experts.cache import ExpertCache
from comet.experts.host import cores as host_cores
from comet.experts.host import worker as host_codes
from comet.experts.host.cores import HostCores, cores_of, open_cores
from comet.experts.host.profile import HostProfile, HostSizes, Link
from comet.experts.host.worker import E2M1_BITS, E4M3_BITS, CodeProducts, refuse_nan, sum_experts
from comet.experts.options import StoreOptions
from comet.experts.store import HeldExperts
from comet.generation.engine import GPTEngine
from comet.generation.job import generate_job
from comet.jobs.config import CommConfig
from comet.jobs.generate import GenerateConfig
from comet.kernels.experts.mailbox import EXPERTS
from comet.kernels.experts.tables import HOSTED
from comet.kernels.runtime.activation import Activation
from comet.kernels.runtime.faults import Place
from comet.layer.group import ExpertGroup
from comet.quantization.formats import quantize_fp8
from comet.training.trainer import train


def engine_of(host_cores: str, group: ExpertGroup | None = None, expert_dtype: str | None = None) -> GPTEngine:
    """A model that answers from few slots, and asks the host's cores for all that is missing."""
    model, group = awake_model(MODEL, group, in_slots=True)
    held = MOE.num_experts // group.parallel.ep
    store = slots_of(min(MOE.top_k + 1, held), held, host_cores=host_cores, expert_dtype=expert_dtype)
    engine = GPTEngine(model, group, store=store)
    if engine.cores is not None:
        leave_all_to(engine.cores)
    return engine


def compare_engines(group: ExpertGroup | None = None, expert_dtype: str | None = None) -> None:
    """Texts with and without the host's cores: the same numbers, up to rounding, and other experts on the link."""
    mine, plain = (engine_of(cores, group, expert_dtype) for cores in ("2" if group else "1", "off"))
    for prompt in (3, 20):  # in waves, and streamed, which leave the cores nothing; steps between and behind
        compare_texts(mine, plain, prompt=prompt, steps=6, compare=nearly_equal)
    mine.check()
    with_host, without = mine.cache_report(), plain.cache_report()
    assert mine.cores.profile.link_ns > 0 < mine.cores.profile.expert_ns
    assert with_host.needed == without.needed
    assert with_host.hosted > 0 == without.hosted
    assert with_host.hosting_s > 0
    assert with_host.fetched < without.fetched or group, "of ranks a prompt that streams may bring all experts"
    assert with_host.hits == 1 - (with_host.fetched + with_host.hosted) / with_host.needed
    mine.cores.close()


@pytest.mark.parametrize("expert_dtype", ["mxfp8", slow(None), slow("mxfp4")])
def test_a_model_answers_from_slots_and_cores(expert_dtype: str | None) -> None:
    compare_engines(expert_dtype=expert_dtype)


@pytest.mark.parametrize("layout", [slow({"ep": 2}), slow({"tp": 2})], ids=["EP2", "TP2"])
@in_ranks(2)
def test_each_rank_has_cores_of_its_own(rank: int, world_size: int, layout: dict[str, int]) -> None:
    group = make_group(MODEL.moe, **layout)
    compare_engines(group)
    group.close()


def test_the_task_reports_what_the_cores_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile is given, because the costs of this machine, and of starting a process on it, vary."""
    measured = HostProfile(
        link_ns=200e3, shared_link_ns=220e3, request_ns=20e3, expert_ns=290e3, full_request_ns=20e3,
        full_expert_ns=290e3,
    )  # fmt: skip
    monkeypatch.setattr(host_cores, "measure_host", lambda *given: measured)
    monkeypatch.setattr(host_cores, "START_S", 3600.0)
    train(make_job(tmp_path, model=MODEL, steps=3, eval_batches=1, sample_bytes=0), Rank())
    settings = GenerateConfig(
        source=str(tmp_path / "out"), prompt="1", max_new_tokens=4, temperature=0.0, expert_budget=0.5, host_cores="1"
    )
    job = replace(make_generation(MODEL, settings), comm=CommConfig(timeout_s=3600.0))
    found = generate_job(job, Rank())["expert_cache"]
    assert found["host_cores"] == {
        "cores": 1, "link_us": 200, "shared_link_us": 220, "request_us": 20, "expert_us": 290, "full_request_us": 20,
        "full_expert_us": 290, "share": [0, 0, 1],
    }  # fmt: skip
    assert 0 <= found["hosted"] <= found["needed"] - found["fetched"]


def request_of(cache: ExpertCache) -> torch.Tensor:
    """A step that misses all of its experts, each token others."""
    ids = torch.arange(CASE.T * CASE.K, dtype=torch.int32).view(CASE.T, CASE.K)
    return warp_decode_torch(torch.ones(CASE.T, CASE.D), ids, torch.ones(CASE.T, CASE.K), cache.weights)


def test_a_process_that_dies_is_named_before_the_next_step() -> None:
    cache, cores = hosted_cache(CASE, CASE.K, SLOW_LINK)
    process = cores.process
    assert torch.isfinite(request_of(cache)).all()
    cores.check()
    process.kill()
    process.wait()
    with pytest.raises(HostComputeError, match=r"the last ones asked for were .* of layer 0: the process ended with"):
        cores.raise_if_failed()
    cores.close()


def test_a_prompt_ends_where_the_cores_do_not_work_and_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt runs in waves, where a CPU asks again after each, or streams."""
    engine, asked = engine_of("1"), []
    monkeypatch.setattr(HostCores, "raise_if_failed", lambda self: asked.append(self))
    for length in (3, 20):
        engine.prefill(torch.zeros(1, length, dtype=torch.int64), torch.tensor([length]), 30)
        assert asked == [engine.cores] * (1 + (MODEL.num_layers if length == 3 else 0))
        asked.clear()
    monkeypatch.undo()
    engine.cores.close()
    with pytest.raises(HostComputeError, match="of layer"):
        engine.prefill(torch.zeros(1, 20, dtype=torch.int64), torch.tensor([20]), 30)


def test_an_answer_that_does_not_come_ends_the_step_by_its_deadline() -> None:
    cache, cores = hosted_cache(CASE, CASE.K, SLOW_LINK)
    process = cores.process
    os.kill(process.pid, signal.SIGSTOP)
    set_deadline(cache, cores, 10**8)
    assert torch.isnan(request_of(cache)).all(), "nobody takes this for a result"
    count = int(cache.tables.header[HOSTED.value])
    assert cores.mail.fault[1:4].tolist() == [Place.HOST, 0, count]
    experts = cores.mail.words[EXPERTS.value : EXPERTS.value + count].tolist()
    assert len(set(experts)) == CASE.T * CASE.K - 1, "one comes to the device"
    with pytest.raises(HostComputeError, match=rf"asked for were \{experts} of layer 0: the process is still at it"):
        cores.check()
    request_of(cache)  # asks the cores no more
    os.kill(process.pid, signal.SIGCONT)
    cores.close()
    assert process.returncode == 0


def test_nothing_is_left_behind() -> None:
    """No process and no memory stays when the cores are released."""
    cache, cores = hosted_cache(CASE, CASE.K, PROFILE)
    process = cores.process
    del cache, cores
    gc.collect()
    assert process.returncode == 0
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    assert not any("comet-experts" in os.readlink(link) for link in links if os.path.islink(link))


def killed_behind_a_start(rank: int, world_size: int, folder: Path) -> None:
    _, cores = hosted_cache(CASE, 3, PROFILE)
    (folder / "pid").write_text(str(cores.process.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_ends_with_its_parent(tmp_path: Path) -> None:
    run_ranks(killed_behind_a_start, 1, tmp_path, may_die=[0])
    assert all_gone([int((tmp_path / "pid").read_text())])


def test_a_process_that_does_not_start_says_why() -> None:
    sizes = HostSizes(num_experts=4, first_expert=0, hidden_size=16, top_k=1, max_tokens=1, dtype=torch.float32)
    cores = HostCores(-1, sizes, CPU, DEADLINE_S)
    held = HeldExperts.fill(HeldExperts(torch.ones(4, 32, 16), torch.ones(4, 16, 16), readable=True), CPU, cores.file)
    with pytest.raises(HostComputeError, match=r"did not start \(RuntimeError: set_num_threads expects a positive"):
        cores.start([held], PROFILE)


def test_the_example_of_a_table() -> None:
    assert PROFILE.share_table(2, 8)[1].tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert SLOW_LINK.share_table(1, 6)[1].tolist() == [0, 0, 1, 2, 3, 4, 5], "one comes to the device"
    assert replace(PROFILE, expert_ns=345).share_table(1, 8)[1].tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3]
    assert replace(PROFILE, shared_link_ns=370).share_table(1, 3)[1].tolist() == [0, 0, 0, 0]
    full = replace(PROFILE, full_request_ns=20, full_expert_ns=2000)
    assert full.share_table(2, 8)[2].tolist() == [0] * 9, "of two tokens the host takes too long"


class Mark:
    """An event of a stream at some milliseconds, on a clock that the test sets."""

    now = 0.0

    def __init__(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return self.at <= Mark.now

    def elapsed_time(self, other: Mark) -> float:
        assert self.at <= other.at
        return other.at - self.at


def test_a_link_is_timed_by_the_copies_of_a_request() -> None:
    """Five copies take 1 ms before and after a request, 3 ms during it; a short request has the next copy."""
    link = Link([HeldExperts(torch.ones(4, 32, 16), torch.ones(4, 16, 16), readable=True)], CPU)
    assert link.cost(0, 0) == link.alone_ns > 0, "there is no link"
    link._stream, link._marks = SimpleNamespace(synchronize=lambda: None), [Mark(at) for at in (1, 2, 5, 8, 9, 10)]
    seen = []
    for Mark.now in (0, 1, 2.5, 8.5, 20):
        seen.append(link.arrived())
    assert seen == [0, 0, 1, 3, 5]
    assert link.cost(1, 3) == 3e6
    assert link.cost(2, 2) == 3e6
    assert link.cost(3, 5) == 1e6
    assert link.cost(5, 5) == 1e6, "all were there before it began"


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=NAMES)
@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_is_of_the_experts_that_a_token_chose(
    num_tokens: int, dtype: torch.dtype, activation: Activation
) -> None:
    """Other experts add nothing, though their output for the token may be NaN."""
    drawn = torch.Generator().manual_seed(1)
    sizes = {"w1": (32, 16), "w2": (16, 16)} | ({"b1": (32,), "b2": (16,)} if activation.parameters else {})
    experts = [
        {name: torch.randn(*size, generator=drawn).to(dtype) / 4 for name, size in sizes.items()} for _ in range(3)
    ]
    tokens = torch.randn(num_tokens, 16, generator=drawn).to(dtype)
    weights = torch.rand(3, num_tokens, generator=drawn)
    if num_tokens > 1:
        weights[0, 0] = weights[1] = weights[2, 1] = 0  # no token chose the second one
        tokens[2], experts[1]["w1"][:] = torch.nan, torch.nan
    expected = torch.zeros(num_tokens, 16, dtype=torch.float64)
    for weight, expert in zip(weights.double(), experts, strict=True):
        w1, w2, b1, b2 = (expert.get(name, torch.zeros(())).double() for name in ("w1", "w2", "b1", "b2"))
        gate, up = (tokens.double() @ w1.T + b1).chunk(2, dim=1)
        added = weight[:, None] * (on_paper(activation, gate, up) @ w2.T + b2)
        expected += added.where(weight[:, None] != 0, 0.0)
    answer = torch.full((num_tokens, 16), torch.nan)
    sum_experts(answer, tokens, weights, experts, CodeProducts(1), activation)
    close = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(answer.double(), expected, rtol=close, atol=close, equal_nan=True)


def test_settings_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cores, "usable_cores", lambda: 16)
    for setting, ranks, cores in (("off", 1, 0), ("auto", 2, 7), ("8", 2, 4), (8, 2, 4), ("16", 1, 16)):
        assert cores_of(setting, ranks) == cores
    for setting in ("17", "1"):
        with pytest.raises(ValueError, match=f"host_cores='{setting}' must be a number from 2"):
            cores_of(setting, 2)
    for setting in ("0", "many", "-3"):
        with pytest.raises(ValueError, match=f"host_cores='{setting}' must be auto, off, or a number of cores"):
            StoreOptions(expert_budget=0.5, host_cores=setting)
    sizes = HostSizes(num_experts=4, first_expert=0, hidden_size=16, top_k=1, max_tokens=1, dtype=torch.float32)
    assert open_cores("auto", sizes, CPU) is None, "the device is the host"
    with pytest.raises(ValueError, match="host_cores='x' must be auto, off, or a number"):
        GenerateConfig(host_cores="x")


CODES = torch.arange(256, dtype=torch.uint8)


def test_every_code_is_its_number() -> None:
    """Codes are e4m3, or e2m1, two in a byte; 0xF1 with a scale of 2 is 1, from its low half, and -12."""
    scales, products = torch.full((1, 16), 127, dtype=torch.uint8), CodeProducts(1)
    found = products.numbers(CODES.view(1, 256).view(torch.float8_e4m3fn), scales[:, :8], 1)[0, 0] * E4M3_BITS[2]
    expected = torch.from_numpy(CODES.numpy().view(ml_dtypes.float8_e4m3fn).astype("float32"))
    is_number = expected.isfinite()
    assert is_number.sum() == 254
    assert torch.equal(found[is_number], expected[is_number])
    found = products.numbers(CODES.view(1, 256), scales, 2)[0] * E2M1_BITS[2]
    numbers = torch.tensor([*E2M1, *(-number for number in E2M1)])
    assert torch.equal(found, torch.stack([numbers[CODES.long() & 15], numbers[CODES.long() >> 4]]))
    found = products.numbers(torch.full((1, 16), 0xF1, dtype=torch.uint8), scales[:, :1] + 1, 2) * E2M1_BITS[2]
    assert found[0, :, 0].tolist() == [1, -12]


@pytest.mark.parametrize("kind", list(QUANTISERS))
@pytest.mark.parametrize("most", [2**20, 3 * 192], ids=["at once", "three rows at a time"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_exact_numbers(
    kind: str, most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 rows have scales in three blocks of at most 128, and 192 columns in one and a half."""
    monkeypatch.setattr(host_codes, "NUMBERS_PER_CORE", most)
    drawn = torch.Generator().manual_seed(1)
    weight = torch.randn(300, 192, generator=drawn) * torch.rand(300, 1, generator=drawn).exp2()
    weight[0] = 0
    packed = QUANTISERS[kind](weight)
    tokens = torch.randn(3, 192, generator=drawn).to(dtype)
    products = CodeProducts(1)
    for _ in range(2):  # in the same memory
        found = products(tokens, packed.elements, packed.scales)
        expected = tokens.double() @ packed.dequantize(torch.float64).T
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    w1, w2 = (quantize_fp8(torch.randn(3, *size)) for size in ((32, 16), (16, 16)))
    refuse_nan([HeldExperts(w1.elements, w2.elements, True, w1.scales, w2.scales)])
    w2.elements.view(torch.uint8)[1, 3, 2] = 0xFF
    with pytest.raises(ValueError, match=r"w2 of expert 1 of layer 0 has a NaN.*: set host_cores=off"):
        refuse_nan([HeldExperts(w1.elements, w2.elements, True, w1.scales, w2.scales)])
    monkeypatch.setattr(host_codes, "NUMBERS_PER_CORE", 8)
    with pytest.raises(ValueError, match="contraction=16 must be at most 8"):
        CodeProducts(1)(torch.ones(1, 16), w1.elements[0], w1.scales[0])
