"""The ``tune`` task: candidates, what is stored of them, and ranks that go on after a candidate failed."""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from late import hurry
from ranks import run_ranks
from torch import Tensor
from training_cases import Rank

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.errors import NothingMeasuredError
from comet.jobs.config import TuneJob
from comet.launch.cli import main
from comet.launch.config import compose, make_job
from comet.layer.expert_path import ExpertPath
from comet.layer.group import ExpertGroup, make_expert_group
from comet.layer.paths import make_path
from comet.schedule.choice import Machine, Problem, default_setting, effective, setting_name
from comet.schedule.table import KEY_COLUMNS, Measured, Profile, Table
from comet.tuner import layers, sweep
from comet.tuner.layers import measure_layer
from comet.tuner.sweep import candidates, tune_job

MODELS = {
    "few": MoEConfig(hidden_size=32, ffn_size=32, num_experts=4, top_k=2, expert_bias=True),
    "many": MoEConfig(hidden_size=64, ffn_size=32, num_experts=8, top_k=1),
}
FIELDS = {name: dict(hidden_size=moe.hidden_size, moe=asdict(moe)) for name, moe in MODELS.items()}


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "read_models", lambda: FIELDS)


def job_of(folder: Path, models: tuple[str, ...], *overrides: str) -> TuneJob:
    """A job of models in ``FIELDS``, which the command line does not know."""
    words = [f"tune.profiles={folder}", "tune.rounds=1", *overrides]
    job = make_job(compose(words, TuneJob), 1, TuneJob)
    return replace(job, tune=replace(job.tune, models=models))


def stored(folder: Path) -> dict[tuple[int, int], Measured]:
    """The measured settings of a profile by hidden size and tokens."""
    rows = Table.load(folder / "fake_x1.csv").rows
    named = ((dict(zip(KEY_COLUMNS, key, strict=True)), item) for (key, _), item in rows.items())
    return {(int(row["hidden_size"]), int(row["tokens"])): item for row, item in named}


def test_candidates_are_legal_distinct_launches_with_plain_and_the_default() -> None:
    rng = random.Random(seed := random.randrange(10**6))
    print(f"seed {seed}")
    qwen3 = MoEConfig(num_experts=128, top_k=8, hidden_size=2048, ffn_size=768)
    for _ in range(40):
        moe = replace(qwen3, hidden_size=rng.choice([64, 512, 2048, 7168]))
        problem = Problem(moe, ParallelConfig(ep=rng.choice([1, 2, 4])), rng.choice([0, 1, 2048]), torch.bfloat16)
        plain, default, *others = tried = candidates(problem)
        assert plain is None
        assert default == effective(default_setting(problem), problem)
        assert len(set(tried)) == len({setting_name(setting) for setting in tried}) == len(tried) <= 11
        for setting in (default, *others):
            assert setting is not None
            assert effective(setting, problem) == setting
        assert {setting.comm_blocks for setting in tried if setting} == {0, 8, 16, 32}
    panels = [each.num_panels for each in candidates(replace(problem, moe=qwen3)) if each and not each.comm_blocks]
    assert sorted(panels) == [1, 2, 3, 4, 6, 8]


@pytest.mark.slow
def test_the_command_on_two_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["tune", "tune.rounds=2", f"tune.profiles={tmp_path}", "tune.tokens=[48,8]", "parallel.ep=2"]) == 0
    out, err = capfd.readouterr()
    lines = out.splitlines()
    found = json.loads(lines[-1])
    assert [best["tokens"] for best in found["best"]] == [48, 8]
    assert sum(line.startswith("tiny ") for line in lines) == found["points"] == len(found["measured"])
    assert "comet: no profile is stored: times of CPU ranks are noise; tune on GPUs" in err.splitlines()
    assert (found["profile"], list(tmp_path.iterdir())) == (None, [])


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU pass for a device whose times count."""
    monkeypatch.setattr(sweep.Machine, "of", lambda device: Machine(name="fake"))


def test_times_of_cpu_ranks_are_not_stored_nor_their_folder_made(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    facts = tune_job(job_of(folder, ("few",), "tune.tokens=[16]"), Rank())
    assert (facts["profile"], folder.exists()) == (None, False)


def test_winners_are_stored_for_a_device_whose_times_count(tmp_path: Path, as_gpu: None) -> None:
    facts = tune_job(job_of(tmp_path, ("few",), "tune.tokens=[48,8]"), Rank())
    path = tmp_path / "fake_x1.csv"
    assert facts["profile"] == str(path)
    times = {tokens: item.ms for (_, tokens), item in stored(tmp_path).items()}
    assert times == pytest.approx({best["tokens"]: best["ms"] for best in facts["best"]}, rel=1e-4)
    assert all(key[KEY_COLUMNS.index("kernels")] == "triton" for key, _ in Table.load(path).rows), "no CUDA C++ here"
    assert len(Profile.open(tmp_path, "fake", 1).best) == 2


def test_a_run_says_what_it_compiles_and_times(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comet.utils.progress.LOG_INTERVAL_S", 0.0)
    tune_job(job_of(tmp_path, ("few",), "tune.tokens=[16,4]"), Rank())
    err = capfd.readouterr().err
    for done, tokens in ((0, 16), (1, 4)):
        point = (
            rf"comet: {done} of 2 shapes measured, [\d:]+ so far, [\d:?]+ left; few EP1 TP1, {tokens} tokens: [\w ,]+"
        )
        assert re.search(rf"^{point} rows at its end$", err, re.MULTILINE)
        assert re.search(rf"^{point}, compiling candidate 2 of \d+$", err, re.MULTILINE)
        assert re.search(rf"^{point}, timing \d+ candidates, round 2$", err, re.MULTILINE)


def test_a_point_of_which_nothing_runs_is_named_and_a_run_of_such_points_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_wide(name: str, moe: MoEConfig, *others) -> ExpertPath:
        if moe.hidden_size == 32:
            raise RuntimeError("no resources")
        return make_path(name, moe, *others)

    monkeypatch.setattr(layers, "make_path", only_wide)
    facts = tune_job(job_of(tmp_path, ("few", "many"), "tune.tokens=[16]"), Rank())
    reason = "RuntimeError: no resources"
    assert {row["failure"] for row in facts["measured"] if row["model"] == "few"} == {reason}
    assert [best["model"] for best in facts["best"]] == ["many"]
    assert f"failed  {reason}" in capfd.readouterr().out
    with pytest.raises(NothingMeasuredError, match=rf"^tune: none of \d+ points ran, the first: {reason}"):
        tune_job(job_of(tmp_path, ("few",), "tune.tokens=[16]"), Rank())


def test_an_interrupted_run_keeps_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_gpu: None
) -> None:
    done = []

    def stops_at_the_third(problem: Problem, *others, **named) -> tuple[Measured, ...]:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(problem)
        return measure_layer(problem, *others, **named)

    monkeypatch.setattr(sweep, "measure_layer", stops_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        tune_job(job_of(tmp_path, ("few", "many"), "tune.tokens=[16,4]"), Rank())
    assert stored(tmp_path).keys() == {(32, 16), (32, 4)}


def test_each_point_has_a_pool_of_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of the pool decides between kernels."""
    pools = []

    def fake(problem: Problem, settings: Sequence[OverlapConfig | None], group, **named) -> tuple[Measured, ...]:
        pools.append((problem.num_tokens, group.workspace.shape.max_tokens, group.workspace.shape.hidden_size))
        return tuple(Measured(setting=setting, ms=1.0) for setting in settings)

    monkeypatch.setattr(sweep, "measure_layer", fake)
    tune_job(job_of(tmp_path, ("few", "many"), "tune.tokens=[300]"), Rank())
    assert pools == [(300, 300, 32), (300, 300, 64)]


MOE = MODELS["few"]
TOKENS = 40
DEADLINE_S = 0.3  # from the harm on, not before: a rank may be slow
BAD = OverlapConfig(comm_blocks=16, num_panels=1)
SETTINGS = [None, OverlapConfig(comm_blocks=8), OverlapConfig(comm_blocks=32), BAD]  # often plain comes after BAD


def leave_fault(group: ExpertGroup) -> None:
    """Leave the note of a kernel that waited too long for rank 3 (layer 1 combine, chunk 5)."""
    group.workspace.fault.copy_(torch.tensor([1, 4, 3, 5, 9, 8, 1, 0]))


def no_harm(group: ExpertGroup) -> None:
    """To the ranks that are not broken."""


def raise_timeout(group: ExpertGroup) -> None:
    """Fail as the twin does; before the path ran, this rank's epoch stays behind and the others wait in vain."""
    raise RuntimeError("rank 1 was asleep")


def break_call(number: int, harm: Callable[[ExpertGroup], None], *, after: bool) -> list[int]:
    """Do ``harm`` before or after call ``number`` of the path with ``BAD``; the list fills with its calls."""

    def harm_in_a_hurry(group: ExpertGroup) -> None:
        hurry(group.comm, DEADLINE_S)
        harm(group)

    calls: list[int] = []

    def broken(name: str, moe: MoEConfig, group: ExpertGroup, overlap: OverlapConfig | None) -> ExpertPath:
        path = make_path(name, moe, group, overlap)

        def run(*arguments: object) -> Tensor:
            calls.append(len(calls))
            if calls[-1] == number and not after:
                harm_in_a_hurry(group)
            output = path(*arguments)
            if calls[-1] == number and after:
                harm_in_a_hurry(group)
            return output

        return run if overlap == BAD else path

    layers.make_path = broken
    return calls


def measure_with_harm(
    rank: int, world_size: int, number: int, harm: str
) -> tuple[list[float | str | None], int, list[int], bool]:
    """Times or reasons; calls of ``BAD``; epoch and fault; and whether the layer still computes what plain computes."""
    do_harm = leave_fault if harm == "fault" else raise_timeout
    calls = break_call(number, do_harm if rank == world_size - 1 else no_harm, after=harm != "raise before")
    parallel = ParallelConfig(ep=world_size)
    group = make_expert_group(MOE, parallel, max_tokens=TOKENS, dtype=torch.float32, device="cpu", timeout_s=60.0)
    problem = Problem(MOE, parallel, TOKENS, torch.float32)
    found = [item.failure or item.ms for item in measure_layer(problem, SETTINGS, group, rounds=3)]
    group.comm.timeout_s = 60.0
    state = [int(group.workspace.epoch), *group.workspace.fault.tolist()]
    inputs = layers.make_inputs(problem, group, seed=7)
    outputs = [inputs.run(make_path(name, MOE, group, OverlapConfig()), 0) for name in ("twin", "plain")]
    group.workspace.check()
    group.close()
    return found, len(calls), state, bool(torch.allclose(*outputs, atol=1e-5))


HARMS = [("fault", 0), ("fault", 1), ("fault", 4), ("raise before", 0), ("raise before", 4), ("raise after", 2)]


@pytest.mark.parametrize(
    ("world_size", "harm", "number"), [(1, "fault", 1), (1, "raise before", 4), *((2, *harm) for harm in HARMS)]
)
def test_only_the_candidate_that_failed_is_out(world_size: int, harm: str, number: int) -> None:
    ranks = run_ranks(measure_with_harm, world_size, number, harm)
    found, num_calls, state, right = ranks[0]
    waited = "CommTimeoutError: rank {} waited 0.3 s for rank {}"
    reason = "RuntimeError: rank 1 was asleep"
    if harm == "fault":
        reason = waited.format(world_size - 1, 3) + " (layer 1 combine, chunk 5, epoch 9, saw 8)"
    elif harm == "raise before" and world_size == 2:
        reason = waited.format(0, 1) + " (exchange of top-k"
    assert str(found[3]).startswith(reason), "of the first rank that failed in this call"
    assert all(isinstance(found[place], float) for place in range(3)), found
    assert all(other[0] == found for other in ranks), "all ranks know alike"
    assert all(other[2] == state for other in ranks), "epochs agree again"
    assert state[1:] == [0] * 8
    assert all(other[3] for other in ranks), "the ranks have recovered"
    assert num_calls <= 1 + 3 + 3, "one to try it, then no more than the loop in which it failed"
    assert right


def test_tune_goes_on_and_keeps_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_gpu: None) -> None:
    monkeypatch.setattr(layers, "make_path", make_path)  # undoes what ``break_call`` sets
    calls = break_call(3, leave_fault, after=True)
    facts = tune_job(job_of(tmp_path, ("few",), "tune.rounds=3", "tune.tokens=[16,4]"), Rank())
    assert len(calls) > 4
    failed = [(row["tokens"], row["setting"]["comm_blocks"]) for row in facts["measured"] if row["ms"] is None]
    assert failed == [(16, 16)]
    assert stored(tmp_path).keys() == {(32, 16), (32, 4)}
