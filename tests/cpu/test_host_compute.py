"""Missing experts computed on the host's cores, by the real process: kernels against twins, engines, faults."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_cases import MATRIX, VECTOR, DecodeCase
from host_cases import DEADLINE_S, PROFILE, SLOW_LINK, hosted_cache, leave_all_to
from ranks import run_ranks
from tiers import slow
from training_cases import MODEL, MOE, Rank, make_job

from comet.config import ParallelConfig
from comet.decode.local import run_kernels
from comet.decode.twin import warp_decode_torch
from comet.errors import HostComputeError
from comet.experts import ExpertCache, host_cores
from comet.experts.host_codes import CodeProducts
from comet.experts.host_cores import HostCores, cores_of, open_cores
from comet.experts.host_profile import HostProfile, HostSizes
from comet.experts.host_worker import add_expert
from comet.experts.store import HeldExperts
from comet.generation.config import GenerateConfig
from comet.generation.engine import GPTEngine
from comet.generation.experts import plan_experts
from comet.generation.job import generate_job
from comet.group import ExpertGroup, make_expert_group
from comet.kernels.expert_host import PLACE_HOST, worth_least
from comet.kernels.expert_mailbox import EXPERTS
from comet.kernels.expert_prefetch import plan_torch, travel_torch
from comet.kernels.expert_tables import COUNT, HOSTED, NEXT, PLANNED, POLICIES
from comet.kernels.expert_waves import split_waves_torch
from comet.models.gpt import GPT
from comet.training.run import train

CPU = torch.device("cpu")
TABLES = ("slots", "arriving", "last_used", "owners")
CASES = [
    DecodeCase(name="vector", T=1, K=3, E=9, D=80, F=48, config=VECTOR, seed=1),
    DecodeCase(name="fold", T=1, K=3, E=9, D=80, F=48, config=replace(VECTOR, fold=True), seed=1),
    DecodeCase(name="vector, two tokens", T=2, K=3, E=24, D=64, F=32, config=VECTOR, seed=2),
    DecodeCase(name="matrix", T=5, K=2, E=40, D=80, F=48, config=MATRIX, seed=3),
    DecodeCase(name="matrix, by expert", T=8, K=2, E=12, D=32, F=16, config=MATRIX, seed=4),
]


CASE = CASES[0]


def cache_of(
    case: DecodeCase, num_slots: int, profile: HostProfile, policy: str = "lru", first: int = 0
) -> tuple[ExpertCache, HostCores]:
    """An empty cache of the case's experts from ``first`` on, and the cores that share them."""
    made = torch.Generator().manual_seed(case.seed)
    shapes = (2 * case.F, case.D), (case.D, case.F)
    w1, w2 = (torch.randn(case.E, *shape, generator=made)[first:] / 8 for shape in shapes)
    sizes = {"top_k": case.K, "max_tokens": case.T, "first_expert": first}
    return hosted_cache(w1, w2, num_slots, CPU, **sizes, profile=profile, policy=policy, quantised=case.quantised)


def set_deadline(cache: ExpertCache, cores: HostCores, timeout_ns: int) -> None:
    """For the answers that the cache waits for."""
    cores.mail = replace(cores.mail, timeout_ns=timeout_ns)
    cache.host = replace(cache.host, mail=cores.mail)
    cache.weights = replace(cache.weights, host=cache.host)


def compare_steps(rank: int, world_size: int, case: DecodeCase, policy: str) -> None:
    """Random steps by kernels and by twins: equal tables, equal splits, and the outputs of resident experts."""
    print("seed", case.seed)
    made = torch.Generator().manual_seed(case.seed)
    slots = min(case.T * case.K, case.E)
    first = int(slots < case.E)
    (mine, cores), (twin, other) = (cache_of(case, slots, PROFILE, policy, first) for _ in range(2))
    resident = ExpertCache(
        **mine.host.named_parts, num_slots=case.E, device=CPU, num_experts=case.E, first_expert=first
    )
    hosted = 0
    for _ in range(6):
        tokens, weights = (torch.rand(case.T, size, generator=made) for size in (case.D, case.K))
        ids = torch.randint(-1, case.E, (case.T, case.K), generator=made, dtype=torch.int32)
        output = run_kernels(tokens, ids, weights, mine.weights, config=case.config)
        expected = warp_decode_torch(tokens, ids, weights, resident.weights)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            warp_decode_torch(tokens, ids, weights, twin.weights), expected, rtol=1e-4, atol=1e-4
        )
        for name in TABLES:
            assert torch.equal(getattr(mine.tables, name), getattr(twin.tables, name)), name
        assert torch.equal(mine.tables.totals[:2], twin.tables.totals[:2])
        assert torch.equal(mine.tables.header, twin.tables.header)
        count, num_hosted = (int(mine.tables.header[word.value]) for word in (COUNT, HOSTED))
        assert num_hosted == cores.mail.share[case.T, count]
        assert torch.equal(mine.tables.copies[:, :count], twin.tables.copies[:, :count])
        assert (mine.tables.copies[1, count - num_hosted : count] == -1).all()
        hosted += num_hosted
    for each in (cores, other):
        assert each.counts[0] == hosted > 0
        each.check()
        each.close()


def compare_waves(rank: int, world_size: int, case: DecodeCase, num_slots: int, policy: str) -> None:
    """Steps in waves: as resident experts give them, as many hosted as the table says of all that the step misses."""
    print("seed", case.seed)
    made = torch.Generator().manual_seed(case.seed)
    (mine, cores), (twin, other) = (cache_of(case, num_slots, PROFILE, policy, first=1) for _ in range(2))
    resident = ExpertCache(**mine.host.named_parts, num_slots=case.E, device=CPU, num_experts=case.E, first_expert=1)
    for step in range(5):
        num_tokens = 1 if step == 3 else case.T  # a step of one wave in between
        tokens, weights = (torch.rand(num_tokens, size, generator=made) for size in (case.D, case.K))
        ids = torch.randint(-1, case.E, (num_tokens, case.K), generator=made, dtype=torch.int32)
        needed = set(ids.flatten().tolist()) - {-1, 0}
        missing = [expert for expert in needed if mine.tables.slots[expert] < 0]
        before = mine.tables.totals.clone()
        output = run_kernels(tokens, ids, weights, mine.weights, config=case.config)
        expected = warp_decode_torch(tokens, ids, weights, resident.weights)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
        found = warp_decode_torch(tokens, ids, weights, twin.weights)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for name in TABLES:
            assert torch.equal(getattr(mine.tables, name), getattr(twin.tables, name)), name
        torch.testing.assert_close(mine.tables.scores, twin.tables.scores)
        assert torch.equal(mine.tables.header, twin.tables.header)
        hosted = int(cores.mail.share[num_tokens, len(missing)])
        spent = (mine.tables.totals - before)[[0, 1, 7]].tolist()
        assert spent == [len(needed), len(missing) - hosted, hosted], "each missing one fetched or hosted, once"
        assert sum(bool(mine.tables.slots[expert] >= 0) for expert in missing) <= len(missing) - hosted
        assert not (mine.tables.arriving == -2).any()
    for each in (cores, other):
        assert each.counts[0] == mine.tables.totals[7] > 0
        each.check()
        each.close()


IN_WAVES = [
    DecodeCase(name="vector", T=2, K=3, E=24, D=64, F=32, config=VECTOR, seed=1),
    DecodeCase(name="matrix", T=5, K=2, E=40, D=80, F=48, config=MATRIX, seed=2),
    DecodeCase(name="by expert", T=8, K=2, E=12, D=32, F=16, config=MATRIX, seed=3),
    DecodeCase(name="mxfp4", T=3, K=2, E=12, D=64, F=32, config=None, seed=5, quantised="mxfp4"),
]


@pytest.mark.parametrize(
    ("case", "policy"),
    [
        pytest.param(case, policy, id=f"{case.name}-{policy}", marks=[] if number == at else pytest.mark.slow)
        for number, case in enumerate(IN_WAVES)
        for at, policy in enumerate(POLICIES)
    ],
)
def test_steps_in_waves_leave_misses_to_the_host(case: DecodeCase, policy: str) -> None:
    run_ranks(compare_waves, 1, case, case.K + 1, policy, interpret=True)


def test_the_example_of_waves_and_the_host() -> None:
    case = DecodeCase(name="example", T=2, K=2, E=5, D=16, F=16)
    cache, cores = cache_of(case, 2, SLOW_LINK)
    cache.tables.slots[4], cache.tables.last_used[3] = 0, 1
    waves = split_waves_torch(torch.tensor([[3, 1], [4, 3]]), cache.host, 2, torch.ones(2, 2))
    assert waves.tolist() == [[[3, -1], [4, 3]], [[-1, -1], [-1, -1]], [[3, -1], [4, 3]]]
    assert cores.mail.words[EXPERTS.value] == 1
    cores.close()


def compare_with_prefetch(rank: int, world_size: int, case: DecodeCase) -> None:
    """What came before its step half or whole is fetched as ever; the host computes others."""
    print("seed", case.seed)
    made, drawn = torch.Generator().manual_seed(case.seed), random.Random(case.seed)
    (mine, cores), (twin, other) = (cache_of(case, case.T * case.K + 1, SLOW_LINK) for _ in range(2))
    for cache in (mine, twin):
        cache.expect_prefetch()
    resident = ExpertCache(mine.host.w1, mine.host.w2, case.E, CPU)
    taken = 0
    for _ in range(8):
        tokens, weights = (torch.rand(case.T, size, generator=made) for size in (case.D, case.K))
        ids = torch.randint(case.E, (case.T, case.K), generator=made, dtype=torch.int32)
        for cache in (mine, twin):
            plan_torch(ids, cache.host)
            travel_torch(cache.weights.parts, cache.host)
        pieces = drawn.randint(0, int(mine.tables.header[NEXT.value]))
        for cache in (mine, twin):  # all of them are there, but the step does not know of those behind
            cache.tables.header[NEXT.value] = pieces
        for copy in range(int(mine.tables.header[PLANNED.value])):
            _, slot, former = mine.tables.ahead[:, copy].tolist()
            if former >= 0 and pieces <= copy * mine.host.pieces:
                for cache in (mine, twin):
                    cache.weights.w1[slot], cache.weights.w2[slot] = cache.host.w1[former], cache.host.w2[former]
        output = run_kernels(tokens, ids, weights, mine.weights, config=case.config)
        expected = warp_decode_torch(tokens, ids, weights, resident.weights)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
        warp_decode_torch(tokens, ids, weights, twin.weights)
        for name in TABLES:
            assert torch.equal(getattr(mine.tables, name), getattr(twin.tables, name)), name
        assert mine.tables.header[HOSTED.value] == twin.tables.header[HOSTED.value]
        count, hosted = (int(mine.tables.header[word.value]) for word in (COUNT, HOSTED))
        taken += count > hosted > 0 and pieces % mine.host.pieces > 0
    assert taken > 0
    assert cores.counts[0] == other.counts[0] > 0
    for each in (cores, other):
        each.close()


def test_experts_on_their_way_are_fetched_and_others_computed() -> None:
    run_ranks(compare_with_prefetch, 1, CASE, interpret=True)


def wait_in_vain(rank: int, world_size: int) -> None:
    cache, cores = cache_of(CASE, CASE.K, SLOW_LINK)
    os.kill(cores.process.pid, signal.SIGSTOP)
    set_deadline(cache, cores, 10**8)
    ids, tokens, weights = torch.arange(CASE.K, dtype=torch.int32)[None], torch.ones(1, CASE.D), torch.ones(1, CASE.K)
    assert run_kernels(tokens, ids, weights, cache.weights, config=CASE.config).isnan().all()
    with pytest.raises(HostComputeError, match=r"within 0\.1 s"):
        cores.check()
    cache.tables.slots.fill_(-1)
    run_kernels(tokens, ids, weights, cache.weights, config=CASE.config)
    assert cache.tables.header[HOSTED.value] == 0, "the host is asked no more"
    os.kill(cores.process.pid, signal.SIGCONT)
    cores.close()


def test_kernels_end_by_the_deadline() -> None:
    run_ranks(wait_in_vain, 1, interpret=True)


QUICK = {("fold", "score"), ("matrix", "lru")}
SPLITS = [
    pytest.param(
        case, policy, id=f"{case.name}-{policy}", marks=[] if (case.name, policy) in QUICK else pytest.mark.slow
    )
    for case in CASES
    for policy in POLICIES
]


SPLITS += [
    pytest.param(replace(case, quantised=kind), "lru", id=kind, marks=[] if kind == "fp8" else pytest.mark.slow)
    for kind in ("fp8", "mxfp8", "mxfp4")
    for case in [DecodeCase(name=kind, T=3, K=2, E=12, D=160, F=32, config=None, seed=6)]
]


@pytest.mark.parametrize(("case", "policy"), SPLITS)
def test_kernels_split_misses_as_their_twins_do(case: DecodeCase, policy: str) -> None:
    run_ranks(compare_steps, 1, case, policy, interpret=True)


def engine_of(host_cores: str, group: ExpertGroup | None = None, expert_dtype: str | None = None) -> GPTEngine:
    """A model that answers from few slots, and asks the host's cores for all that is missing."""
    if group is None:
        group = make_expert_group(MODEL.moe, ParallelConfig(), max_tokens=256, dtype=torch.float32, device="cpu")
    model = GPT(MODEL, group, seed=1, expert_device=CPU)
    drawn = torch.Generator().manual_seed(1)
    model.head.weight.data.copy_(torch.randn(model.head.weight.shape, generator=drawn) * 0.3)
    engine = GPTEngine(model, group, expert_slots=MOE.top_k + 1, host_cores=host_cores, expert_dtype=expert_dtype)
    if engine.cores is not None:
        leave_all_to(engine.cores)
    return engine


def compare_engines(group: ExpertGroup | None = None, expert_dtype: str | None = None) -> None:
    """Texts with and without the host's cores: the same numbers, up to rounding, and other experts on the link."""
    mine, plain = (engine_of(cores, group, expert_dtype) for cores in ("2" if group else "1", "off"))
    drawn = torch.Generator().manual_seed(7)
    ids = torch.randint(256, (1, 3), generator=drawn)  # in waves
    found = [engine.prefill(ids, torch.tensor([3]), 30) for engine in (mine, plain)]
    for _ in range(6):
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
        token = torch.randint(256, (1,), generator=drawn)
        found = [engine.decode(token) for engine in (mine, plain)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    mine.check()
    with_host, without = mine.cache_report(), plain.cache_report()
    assert mine.cores is not None
    assert with_host is not None
    assert without is not None
    assert with_host.needed == without.needed
    assert with_host.hosted > 0 == without.hosted
    assert with_host.hosting_s > 0
    assert with_host.fetched < without.fetched
    assert with_host.hits == 1 - (with_host.fetched + with_host.hosted) / with_host.needed
    mine.cores.close()


@pytest.mark.parametrize("expert_dtype", [None, "mxfp8", slow("mxfp4")])
def test_a_model_answers_from_slots_and_cores(expert_dtype: str | None) -> None:
    compare_engines(expert_dtype=expert_dtype)


@pytest.mark.parametrize("layout", [{"ep": 2}, slow({"tp": 2})], ids=["EP2", "TP2"])
def test_each_rank_has_cores_of_its_own(layout: dict[str, int]) -> None:
    run_ranks(engines_over_ranks, 2, layout)


def engines_over_ranks(rank: int, world_size: int, layout: dict[str, int]) -> None:
    group = make_expert_group(MODEL.moe, ParallelConfig(**layout), max_tokens=64, dtype=torch.float32, device="cpu")
    compare_engines(group)
    group.close()


def test_the_task_reports_what_the_cores_cost(tmp_path: Path) -> None:
    train(make_job(tmp_path, model=MODEL, steps=3, eval_batches=1, sample_bytes=0), Rank())
    settings = GenerateConfig(
        source=str(tmp_path / "out"), prompt="1", max_new_tokens=4, temperature=0.0, expert_budget=0.5, host_cores="1"
    )
    result = generate_job(replace(make_job(tmp_path, model=MODEL), generate=settings), Rank())
    facts = result["expert_cache"]["host_cores"]
    assert facts["cores"] == 1
    assert facts["link_us"] > 0 < facts["expert_us"]
    assert len(facts["share"]) == MOE.top_k + 1
    assert result["expert_cache"]["hosted"] >= 0


def request_of(cache: ExpertCache, case: DecodeCase = CASE) -> torch.Tensor:
    """A step that misses all of its experts, each token others."""
    ids = torch.arange(case.T * case.K, dtype=torch.int32).view(case.T, case.K)
    return warp_decode_torch(torch.ones(case.T, case.D), ids, torch.ones(case.T, case.K), cache.weights)


def test_a_process_that_dies_is_named_before_the_next_step() -> None:
    cache, cores = cache_of(CASE, CASE.K, SLOW_LINK)
    process = cores.process
    assert torch.isfinite(request_of(cache)).all()
    cores.check()
    process.kill()
    process.wait()
    with pytest.raises(HostComputeError, match=r"the last ones asked for were .* of layer 0: the process ended with"):
        cores.raise_if_failed()
    cores.close()


def test_a_prompt_asks_once_whether_the_cores_still_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """In waves or streamed, whoever reads it; and it ends where they do not."""
    engine = engine_of("1")
    cores, asked = engine.cores, []
    monkeypatch.setattr(HostCores, "raise_if_failed", lambda self: asked.append(self))
    for length in (3, 20):
        engine.prefill(torch.zeros(1, length, dtype=torch.int64), torch.tensor([length]), 30)
        assert asked.pop() is cores
        assert not asked
    monkeypatch.undo()
    cores.process.kill()
    cores.process.wait()
    with pytest.raises(HostComputeError, match="of layer"):
        engine.prefill(torch.zeros(1, 20, dtype=torch.int64), torch.tensor([20]), 30)
    cores.close()


@pytest.mark.parametrize(
    "case",
    [CASE, IN_WAVES[0], replace(CASE, D=64, F=32, quantised="mxfp4")],
    ids=["one wave", "waves", "mxfp4"],
)
def test_an_answer_that_does_not_come_ends_the_step_by_its_deadline(case: DecodeCase) -> None:
    cache, cores = cache_of(case, case.K, SLOW_LINK)
    os.kill(cores.process.pid, signal.SIGSTOP)
    set_deadline(cache, cores, 10**8)
    assert torch.isnan(request_of(cache, case)).all(), "nobody takes this for a result"
    count = int(cache.tables.header[HOSTED.value])
    assert cores.mail.fault[1:4].tolist() == [PLACE_HOST.value, 0, count]
    experts = cores.mail.words[EXPERTS.value : EXPERTS.value + count].tolist()
    assert len(set(experts)) == case.T * case.K - 1, "one comes to the device"
    with pytest.raises(HostComputeError, match=rf"asked for were \{experts} of layer 0: the process is still at it"):
        cores.check()
    request_of(cache, case)  # asks nobody any more
    os.kill(cores.process.pid, signal.SIGCONT)
    cores.close()


def test_nothing_is_left_behind() -> None:
    """Neither a process nor memory, whether the cores are closed or forgotten, or their own process dies."""
    cache, cores = cache_of(CASE, CASE.K, PROFILE)
    process = cores.process
    cores.close()
    assert process.returncode == 0
    del cache, cores
    gc.collect()
    cache, cores = cache_of(CASE, CASE.K, PROFILE)
    process = cores.process
    del cache, cores
    gc.collect()
    assert process.returncode == 0
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    assert not any("comet-experts" in os.readlink(link) for link in links if os.path.islink(link))


def test_a_process_ends_with_its_parent() -> None:
    folder = Path(__file__).parent
    code = (
        f"import sys; sys.path[:0] = [{str(folder)!r}, {str(folder.parent)!r}]\n"
        "import os, test_host_compute as cases\n"
        "_, cores = cases.cache_of(cases.CASE, 3, cases.PROFILE)\n"
        "print(cores.process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert child.returncode == -signal.SIGKILL, child.stderr
    pid, deadline = int(child.stdout), time.monotonic() + DEADLINE_S
    while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline, f"process {pid} outlives its parent"
        time.sleep(0.02)


def test_a_process_that_does_not_start_says_why() -> None:
    sizes = HostSizes(num_experts=4, first_expert=0, hidden_size=16, top_k=1, max_tokens=1, dtype=torch.float32)
    cores = HostCores(-1, sizes, CPU, DEADLINE_S)
    held = HeldExperts.fill(HeldExperts(torch.ones(4, 32, 16), torch.ones(4, 16, 16), readable=True), CPU, cores.file)
    with pytest.raises(HostComputeError, match=r"did not start \(RuntimeError: set_num_threads expects a positive"):
        cores.start([held], PROFILE)


def test_the_example_of_a_table() -> None:
    assert PROFILE.share_table(2, 8)[1].tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert SLOW_LINK.share_table(1, 6)[1].tolist() == [0, 0, 1, 2, 3, 4, 5], "one comes to the device"
    full = replace(PROFILE, full_request_ns=20, full_expert_ns=2000)
    assert full.share_table(2, 8)[2].tolist() == [0] * 9, "of two tokens the host takes too long"


def test_a_slow_host_is_left_out() -> None:
    table = replace(PROFILE, expert_ns=10_000, full_expert_ns=10_000).share_table(4, 8)
    assert not table.any()


def test_the_example_of_what_an_expert_adds() -> None:
    answer = torch.zeros(1, 1)
    w1, w2 = torch.tensor([[32.0], [2.0]]), torch.tensor([[0.5]])
    add_expert(answer, torch.ones(1, 1), torch.tensor([[0.5]]), w1, w2, codes=CodeProducts(1))
    assert answer.tolist() == [[16.0]]


def test_those_worth_least_go_to_the_host() -> None:
    assert worth_least([1, 4, 6], torch.tensor([9.0, 3, 9, 9, 0, 9, 0]), 2) == [4, 6]
    assert worth_least([1, 4, 6], torch.tensor([9.0, 3, 9, 9, 0, 9, 0]), 1) == [4]


def test_settings_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cores, "usable_cores", lambda: 16)
    assert [cores_of(setting, ranks) for setting, ranks in (("off", 1), ("auto", 2), ("8", 2), ("16", 1))] == [
        0,
        7,
        4,
        16,
    ]
    for setting in ("17", "1"):
        with pytest.raises(ValueError, match=f"host_cores='{setting}' must be a number from 2"):
            cores_of(setting, 2)
    for setting in ("0", "many", "-3"):
        with pytest.raises(ValueError, match=f"host_cores='{setting}' must be auto, off, or a number of cores"):
            cores_of(setting, 2)
    sizes = HostSizes(num_experts=4, first_expert=0, hidden_size=16, top_k=1, max_tokens=1, dtype=torch.float32)
    assert open_cores("auto", sizes, CPU) is None, "the device is the host"
    with pytest.raises(ValueError, match="host_cores='x' must be auto, off, or a number"):
        GenerateConfig(host_cores="x")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"expert_budget": None}, "generate.host_cores=1 must come with an expert_budget"),
    ],
)
def test_settings_that_do_not_go_together(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    settings = GenerateConfig(source=str(tmp_path), **{"expert_budget": 0.5, "host_cores": "1", **changed})
    with pytest.raises(ValueError, match=message):
        plan_experts(replace(make_job(tmp_path, model=MODEL), generate=settings), torch.float32)
