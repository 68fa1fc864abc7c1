"""Checkpoints: bit-exact, loadable on another layout, and never half a checkpoint.

Checkpoints that are broken, were changed, hold NaN, do not fit on the disk or would run code are refused.
"""

import errno
import json
import os
import pickle
import resource
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from tiers import slow
from training_cases import GPT_OSS, MODEL, MOE, TEXT, TRAIN, Rank, losses, make_job, make_model, train_on_rank

from comet.config import ParallelConfig
from comet.generation.source import Source, model_of
from comet.launch.failures import is_user_error
from comet.training import checkpoint_folder, trainer
from comet.training.checkpoint import Checkpointer, load_weights
from comet.training.checkpoint_files import Reader
from comet.training.checkpoint_folder import (
    checksum,
    choose_checkpoint,
    find_checkpoints,
    list_checkpoints,
    read_checkpoint,
)
from comet.training.optimizer import make_optimizer
from comet.training.step import TrainStep
from comet.training.trainer import train

BIASED = replace(MODEL, moe=replace(MOE, balance="bias", bias_update_rate=0.5))  # a buffer of the router, saved, too
BIASED_OSS = replace(GPT_OSS, moe=replace(GPT_OSS.moe, balance="bias", bias_update_rate=0.5))
NARROW = replace(MODEL, moe=replace(MOE, ffn_size=48))  # 24 columns per TP rank are padded


def make_trainer(folder, *, model=MODEL, seed=0):
    gpt, group = make_model(model, seed=seed)
    optimizer = make_optimizer(gpt, TRAIN)
    return TrainStep(gpt, optimizer, group, TEXT, TRAIN), Checkpointer(Path(folder), gpt, optimizer, group)


def save_steps(folder, steps):
    train_step, checkpointer = make_trainer(folder)
    for step in range(max(steps)):
        train_step(step)
        if step + 1 in steps:
            checkpointer.save(step + 1)
    return train_step


def train_each(rank, world_size, *jobs):
    return [train(job, Rank(rank, world_size))["heldout_nats_per_byte"] for job in jobs]


@pytest.mark.parametrize(
    ("ep", "tp", "model"), [slow(2, 1, MODEL), slow(1, 2, NARROW), slow(1, 1, BIASED), (2, 2, BIASED_OSS)]
)
def test_ranks_go_on_bit_for_bit_and_on_other_layouts_nearly_so(tmp_path, ep, tp, model):
    names, settings = ("whole", "again", "other"), dict(model=model, ep=ep, tp=tp, steps=6, checkpoint_every=3)
    whole, again, other = (make_job(tmp_path, **settings, output_dir=str(tmp_path / name)) for name in names)
    halfway = str(tmp_path / "whole" / "step-000003")
    layout = ParallelConfig(tp=2) if (ep, tp) == (2, 1) else ParallelConfig(ep=2)
    jobs = (whole, replace(again, resume=halfway), replace(other, resume=halfway, parallel=layout))
    ends = run_ranks(train_each, max(2, ep * tp), *jobs)[0]
    wanted, same, nearly = ([*losses(tmp_path / name), end] for name, end in zip(names, ends, strict=True))
    assert same == wanted
    assert nearly == pytest.approx(wanted, rel=1e-5)
    alone = replace(whole, parallel=ParallelConfig(), output_dir=str(tmp_path / "alone"), resume=whole.output_dir)
    assert train(alone, Rank())["heldout_nats_per_byte"] == pytest.approx(ends[0], rel=1e-5)


def test_newest_two_are_kept_and_found(tmp_path):
    save_steps(tmp_path, [1, 2, 3])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]
    assert find_checkpoints("auto", str(tmp_path))[0][0].step == 3
    assert find_checkpoints(str(tmp_path), "unused")[0][0].step == 3
    assert find_checkpoints(str(tmp_path / "step-000002"), "unused")[0][0].step == 2
    assert find_checkpoints(None, str(tmp_path)) == ([], [])
    assert find_checkpoints("auto", str(tmp_path / "new")) == ([], [])


def test_every_file_is_on_the_disk_before_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    """Otherwise a power loss may leave a manifest with sizes of empty files."""
    fsync, on_disk = os.fsync, set()

    def noted(file):
        fsync(file)
        on_disk.add(os.stat(file).st_ino)

    monkeypatch.setattr(os, "fsync", noted)
    (killed := tmp_path / "step-000001.tmp").mkdir()
    (killed / "comet.yaml.tmp").touch()  # a job was killed while it wrote this file
    path = make_trainer(tmp_path)[1].save(1)
    assert path == tmp_path / "step-000001"
    assert {"comet.yaml", "comet.json", ".metadata", "__0_0.distcp"} == {file.name for file in path.iterdir()}
    assert {each.stat().st_ino for each in (tmp_path, path, *path.iterdir())} <= on_disk


def complete_empty(folder, *steps):
    for step in steps:
        path = checkpoint_folder.open_partial(folder, step)
        for name in ("comet.yaml", ".metadata"):
            (path / name).touch()
        checkpoint_folder.complete(path, {"step": step, "layout": {}, "model": {}}, {})


def test_a_checkpoint_is_written_though_an_outdated_one_cannot_be_removed(tmp_path, monkeypatch, caplog):
    def busy(path):
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    complete_empty(tmp_path, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, "remove_checkpoint", busy)
        complete_empty(tmp_path, 3, 4)  # the last one finds what is left of step 1, and leaves step 2
    (*_, said) = caplog.messages
    assert said.startswith(
        f"{tmp_path}/step-000002 could not be removed, which the next checkpoint tries again: [Errno"
    )
    assert sorted(path.name for path in tmp_path.glob("*.tmp")) == ["step-000001.tmp", "step-000002.tmp"]
    complete_empty(tmp_path, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004", "step-000005"]


def test_checkpoints_are_newest_in_the_order_of_saving_though_the_clock_goes_back(tmp_path, monkeypatch):
    now = iter([4e9, 2e9, 1e9, 1e9])
    monkeypatch.setattr(checkpoint_folder.time, "time", lambda: next(now))
    complete_empty(tmp_path, 1, 2, 3, 4)
    assert [found.step for found in list_checkpoints(tmp_path)[0]] == [4, 3]


def test_a_new_run_in_an_old_folder_replaces_what_it_reaches(tmp_path):
    save_steps(tmp_path, [2, 3])
    save_steps(tmp_path, [2])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]
    assert find_checkpoints("auto", str(tmp_path))[0][0].step == 2  # newest by time, not by number


def kill_while_saving(rank, world_size, folder, moment):
    """Without a process group: save step 1, then die by SIGKILL at ``moment`` of saving step 2."""
    dist.destroy_process_group()
    train_step, checkpointer = make_trainer(folder)
    train_step(0)
    checkpointer.save(1)
    train_step(1)

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "data":
        dcp.FileSystemWriter.finish = die
    elif moment == "manifest":
        checkpoint_folder.json.dumps = die
    else:
        Path.rename = die
    checkpointer.save(2)


@pytest.mark.parametrize("moment", ["data", "manifest", "rename"])
def test_kill_while_saving_leaves_the_previous_one(tmp_path, moment):
    with pytest.raises(AssertionError, match=r"rank 0 \(exit code -9\)"):
        run_ranks(kill_while_saving, 1, str(tmp_path), moment)
    assert (tmp_path / "step-000002.tmp").is_dir()
    with pytest.raises(ValueError, match=r"step-000002\.tmp is half-written.*complete is .*step-000001"):
        find_checkpoints(str(tmp_path / "step-000002.tmp"), "unused")
    checkpoint, skipped = choose_checkpoint(*find_checkpoints("auto", str(tmp_path)))
    assert checkpoint.step == 1
    assert len(skipped) == 1
    assert "step-000002.tmp is half-written" in skipped[0]
    train_step, checkpointer = make_trainer(tmp_path, seed=9)
    assert checkpointer.load(checkpoint) == 1
    train_step(1)
    checkpointer.save(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_auto_does_not_start_anew_over_checkpoints_that_were_whole(tmp_path):
    save_steps(tmp_path, [1])
    data = next((tmp_path / "step-000001").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    (tmp_path / "step-000002.tmp").mkdir()
    with pytest.raises(ValueError, match=r"resume='auto' finds .*step-000001 is truncated.*overwrite=true"):
        find_checkpoints("auto", str(tmp_path))
    shutil.rmtree(tmp_path / "step-000001")
    found, skipped = find_checkpoints("auto", str(tmp_path))
    assert found == []
    assert "half-written" in skipped[0]


def edit_manifest(folder, change):
    content = json.loads((folder / "comet.json").read_text())
    change(content)
    (folder / "comet.json").write_text(json.dumps(content))


DAMAGES = {
    r"is truncated: __0_0\.distcp has \d+ bytes, its manifest says \d+ bytes": lambda folder: os.truncate(
        folder / "__0_0.distcp", 1000
    ),
    r"is truncated: __0_0\.distcp is gone, its manifest says \d+ bytes": lambda folder: os.remove(
        folder / "__0_0.distcp"
    ),
    r"is damaged: comet\.json cannot be read": lambda folder: os.truncate(folder / "comet.json", 100),
    r"format=99 must be 2: Comet 0\.1\.0 resumes format 1": lambda folder: edit_manifest(
        folder, lambda content: content.update(format=99)
    ),
    r"is half-written: it has no comet\.json": lambda folder: os.remove(folder / "comet.json"),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_damaged_newest_is_named_and_passed_over(tmp_path, message):
    save_steps(tmp_path, [1, 2])
    newest = tmp_path / "step-000002"
    DAMAGES[message](newest)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(newest)
    with pytest.raises(ValueError, match=message + r".*complete is .*step-000001"):
        find_checkpoints(str(newest), "unused")
    checkpoint, (skipped,) = choose_checkpoint(*find_checkpoints(str(tmp_path), "unused"))
    assert checkpoint.step == 1
    assert "step-000002" in skipped


def test_a_checkpoint_that_its_run_removes_meanwhile_is_passed_over(tmp_path, monkeypatch):
    folder = tmp_path / "step-000001"
    folder.mkdir()
    (folder / checkpoint_folder.MANIFEST).write_text("{}")

    def removed(text):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(folder))

    monkeypatch.setattr(json, "loads", removed)
    assert list_checkpoints(tmp_path) == ([], [f"[Errno 2] No such file or directory: '{folder}'"])


def test_folder_without_checkpoints(tmp_path):
    with pytest.raises(ValueError, match=r"resume=.* must hold a complete checkpoint; it has none"):
        find_checkpoints(str(tmp_path), "unused")
    with pytest.raises(FileNotFoundError, match=r"resume must be 'auto', a checkpoint or a folder.*nowhere") as caught:
        find_checkpoints(str(tmp_path / "nowhere"), "unused")
    assert is_user_error(caught.value)
    with pytest.raises(FileNotFoundError, match=r"resume must be"):
        find_checkpoints(str(tmp_path / "step-000007"), "unused")


def test_checkpoints_from_before_activations_and_biases_are_of_plain_swiglu(tmp_path):
    save_steps(tmp_path, [1])
    checkpoint = tmp_path / "step-000001"
    newer = ("moe.activation", "moe.expert_bias")

    def forget(content):
        content["model"] = {name: value for name, value in content["model"].items() if not name.startswith(newer)}

    edit_manifest(checkpoint, forget)
    checkpoint = read_checkpoint(checkpoint)
    assert make_trainer(tmp_path)[1].load(checkpoint) == 1
    assert model_of(Source(checkpoint.path, checkpoint)) == MODEL
    with pytest.raises(ValueError, match=r"moe.activation.name='swiglu' there but 'clamped_swiglu' here"):
        make_trainer(tmp_path, model=GPT_OSS)[1].load(checkpoint)


def test_another_model_is_refused_with_every_field(tmp_path):
    save_steps(tmp_path, [1])
    other = replace(MODEL, num_layers=3, moe=replace(MOE, num_experts=8))
    checkpointer = make_trainer(tmp_path, model=other)[1]
    with pytest.raises(ValueError, match=r"moe\.num_experts=4 there but 8 here, num_layers=2 there but 3 here"):
        checkpointer.load(list_checkpoints(tmp_path)[0][0])
    renamed = replace(MODEL, name="other", moe=replace(MOE, aux_loss_coef=0.5))
    assert make_trainer(tmp_path, model=renamed)[1].load(list_checkpoints(tmp_path)[0][0]) == 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Output folder of a run with the checkpoints step-000003 and step-000006, and its text in the folder above."""
    folder = tmp_path_factory.mktemp("saved")
    train(make_job(folder, checkpoint_every=3), Rank())
    return folder / "out"


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "comet.yaml"])
def test_a_flipped_byte_is_named_and_passed_over(saved, tmp_path, capsys, name):
    out = tmp_path / "out"
    shutil.copytree(saved, out)
    flip_a_byte(out / "step-000006" / name)
    checkpoint = read_checkpoint(out / "step-000006")
    message = rf"step-000006 of step 6 is damaged: the bytes of {name}.*; .*step-000003 is intact"
    with pytest.raises(ValueError, match=message):
        load_weights(make_model()[0], checkpoint)
    with pytest.raises(ValueError, match=message):
        train(make_job(tmp_path, resume=str(checkpoint.path)), Rank())
    assert train(make_job(tmp_path, resume="auto"), Rank())["steps"] == 6
    error = capsys.readouterr().err
    assert f"skipped: checkpoint {checkpoint.path} of step 6 is damaged: the bytes of {name}" in error
    assert "from step 3" in error
    assert losses(out) == losses(saved)


def test_ranks_share_the_reading_and_agree_on_damage(saved, tmp_path):
    out = tmp_path / "out"
    run_ranks(train_on_rank, 2, make_job(tmp_path, ep=2, checkpoint_every=3))
    flip_a_byte(out / "step-000006" / "__1_0.distcp")
    first, second = run_ranks(train_on_rank, 2, make_job(tmp_path, ep=2, resume="auto"))
    assert first == second
    flip_a_byte(out / "step-000003" / "__0_0.distcp")
    flip_a_byte(out / "step-000006" / "__0_0.distcp")
    with pytest.raises(AssertionError, match=r"step-000006 of step 6 is damaged.*step-000003 of step 3 is damaged"):
        run_ranks(train_on_rank, 2, make_job(tmp_path, ep=2, resume="auto"))


def test_nan_is_not_saved_over_a_good_checkpoint(tmp_path, monkeypatch):
    class Spoiling(trainer.TrainStep):
        def __call__(self, step, **rest):
            metrics = super().__call__(step, **rest)
            if step == 4:
                next(iter(self.optimizer.state.values()))["exp_avg_sq"].view(-1)[7] = float("inf")
            return metrics

    monkeypatch.setattr(trainer, "TrainStep", Spoiling)
    message = (
        r"training diverged at step 5 \(NaN or Inf in optimizer\.\S+\.exp_avg_sq and 0 other tensors, which are not "
        r"saved\): train\.lr=0\.01 must be lower.*the last checkpoint is .*step-000004"
    )
    with pytest.raises(ValueError, match=message):
        train(make_job(tmp_path, checkpoint_every=1), Rank())
    assert [found.step for found in list_checkpoints(tmp_path / "out")[0]] == [4, 3]


def write_little(rank, world_size, job, most):
    """The job in a process that may only write small files; rank 0 may write large ones."""
    if rank == world_size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    with pytest.raises(
        ValueError, match=r"step-000003 cannot be written: File too large: it needs .*is none"
    ) as caught:
        train(job, Rank(rank, world_size))
    return str(caught.value)


def test_a_file_that_cannot_be_written_is_one_line_on_all_ranks(tmp_path):
    first, second = run_ranks(write_little, 2, make_job(tmp_path, ep=2, checkpoint_every=3), 20_000)
    assert first == second
    assert len(first.splitlines()) == 1
    assert not list((tmp_path / "out").glob("step-*"))


class Bomb:
    """A call in a pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.path}",)


def bomb_metadata(folder: Path, bomb: Bomb) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(bomb))


def bomb_as_bytes(folder: Path, bomb: Bomb) -> None:
    """Weights that are no tensors: torch's own planner unpickles them."""
    names = Reader(folder).read_metadata().state_dict_metadata
    state = {name: torch.zeros(kind.size) for name, kind in names.items()}
    state["model.embedding.weight"] = bomb
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def bomb_as_tensor(folder: Path, bomb: Bomb) -> None:
    """The bytes of every tensor are those of a pickle."""
    file, metadata = folder / "__0_0.distcp", Reader(folder).read_metadata()
    torch.save(bomb, file)
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, file.stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def point_elsewhere(folder: Path, bomb: Bomb) -> None:
    metadata = Reader(folder).read_metadata()
    next(iter(metadata.storage_data.values())).relative_path = f"../../{bomb.path.name}"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        (
            bomb_metadata,
            r"refused: \.metadata must describe tensors and plain data only, but it asks for posix.system",
        ),
        (bomb_as_bytes, r"is refused: .* it asks for torch\.distributed\.checkpoint\.metadata\.BytesStorageMetadata"),
        (bomb_as_tensor, r"cannot be read: Weights only load failed"),
        (point_elsewhere, r"is refused: .* it points to '\.\./\.\./ran'"),
    ],
)
def test_a_checkpoint_of_somebody_else_runs_no_code(saved, tmp_path, attack, message):
    folder, ran = tmp_path / "step-000006", tmp_path / "ran"
    shutil.copytree(saved / folder.name, folder)
    attack(folder, Bomb(ran))
    manifest = json.loads((folder / "comet.json").read_text())
    for name, file in manifest["files"].items():  # an attacker can compute checksums
        file.update({"bytes": (folder / name).stat().st_size, "blake2b": checksum(folder / name)})
    (folder / "comet.json").write_text(json.dumps(manifest))
    assert read_checkpoint(folder).step == 6
    with pytest.raises(ValueError, match=message) as caught:
        load_weights(make_model(MODEL)[0], read_checkpoint(folder))
    assert len(str(caught.value).splitlines()) == 1
    assert not ran.exists()


def test_what_is_saved_can_be_read_by_the_reader_that_admits_tensors_only(tmp_path):
    kinds = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]
    state = {str(kind): torch.ones(3, 2).to(kind) for kind in kinds}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, storage_reader=Reader(tmp_path), no_dist=True)
    assert all(torch.equal(found[name].float(), tensor.float()) for name, tensor in state.items())
