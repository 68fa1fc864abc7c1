"""The training job: text and checkpoint in, model trained over all ranks and judged, report out."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.profiler
from torch import Tensor
from torch.nn.functional import cross_entropy

from comet.comm.handshake import largest
from comet.config import OverlapConfig, require
from comet.errors import NotFiniteError
from comet.jobs.config import TrainConfig, TrainJob, activation_dtype, model_group
from comet.layer.backend import layer_choice
from comet.layer.group import ExpertGroup
from comet.layer.paths import path_to_train
from comet.models.gpt import GPT
from comet.schedule.choice import Machine
from comet.training.checkpoint import Checkpointer
from comet.training.checkpoint_folder import Checkpoint, choose_checkpoint
from comet.training.data import Corpus, Text, heldout_windows, read_corpus
from comet.training.optimizer import learning_rate, make_optimizer, shard_dense
from comet.training.ranks import RankContext, Stopped, StopRequest, from_first_rank, gather, hosts_in_turn
from comet.training.report import PROFILE, Reporter, Speed, Trackers, Window, peak_memory_bytes, speed_of
from comet.training.run_folder import RunFolder
from comet.training.saved_settings import read_settings, removed_settings, require_same, settings_of, to_yaml
from comet.training.step import StepMetrics, TrainStep, deterministic
from comet.training.tokens import Tokens, Vocabulary

WINDOW_STEPS = 10
PROMPT_BYTES = 32


def train(config: TrainJob, context: RankContext) -> dict[str, Any]:
    """Train, evaluate and report (collective).

    After an error the ranks' shared memory is left to the end of the process, because closing it is collective.
    """
    dtype = activation_dtype(config.train.dtype, context.device)  # A resumed run keeps it on any device.
    config = replace(config, train=replace(config.train, dtype="bfloat16" if dtype == torch.bfloat16 else "float32"))
    corpus = hosts_in_turn(lambda: read_corpus(config.data, config.model.context, config.model.vocab_size))
    config = replace(config, data=replace(config.data, end_token=corpus.vocabulary.end_token))
    texts = gather(text := corpus.digest)
    different = [rank for rank, other in enumerate(texts) if other != texts[0]]  # Nodes may have files of their own.
    require(not different, f"{corpus.source} must be the same on all ranks, but differs between rank 0 and {different}")
    with RunFolder(config, context.attempt, context.job) as folder:
        checkpoint, skipped = choose_checkpoint(*from_first_rank(folder.find_checkpoints))
        if checkpoint is not None:
            checkpoint.check_model(config.model)
        notes = [f"skipped: {reason}" for reason in skipped]
        notes += from_first_rank(lambda: _require_same(config, checkpoint, text, context.world_size))
        from_first_rank(folder.acquire)
        folder.require_shared()
        group = model_group(config, context.device, max_tokens=config.step_tokens, dtype=dtype)
        with deterministic(context.device):
            trainer = Trainer(config, group, corpus, checkpoint)
            trainer.require_room()
            # The old content of the folder is removed only now, after the last check of settings.
            from_first_rank(lambda: folder.begin(to_yaml(settings_of(config, context.world_size))))
            trainer.report_start([*trainer.notes, *notes])
            result = trainer.run()
        group.close()
    return result


class Trainer:
    """A training job whose ranks, text and checkpoint are in place; ``report_start`` begins to write its files."""

    reporter: Reporter

    def __init__(self, config: TrainJob, group: ExpertGroup, corpus: Corpus, checkpoint: Checkpoint | None) -> None:
        self.config = config
        self.group = group
        self.corpus = corpus
        self.output_dir = Path(config.output_dir)
        path, overlap, self.notes = kept_layers(config, group, checkpoint)
        shared: dict[str, Any] = {"seed": config.train.seed, "recomputes": config.train.gradient_checkpointing}
        self.model = GPT(config.model, group, path=path, overlap=overlap, **shared)
        if config.train.fsdp and group.world_size > 1:
            shard_dense(self.model, group)
        ran = next((layer.path for layer in self.model.moe_layers()), path)
        split = layer_choice(config.model.moe, group, overlap).setting if ran == "fused" else None
        layers = {
            "device": Machine.of(group.device).name, "path": ran, "overlap": split and asdict(split),
            "nodes": group.num_nodes,
        }  # fmt: skip
        optimizer = make_optimizer(self.model, config.train)
        self.train_step = TrainStep(self.model, optimizer, group, corpus.train, config.train, corpus.starts)
        self.checkpointer = Checkpointer(
            self.output_dir, self.model, optimizer, group, settings_of(config, group.world_size), corpus.digest, layers,
            corpus.vocabulary.tokenizer_json, config.train.async_save,
        )  # fmt: skip
        self.first_step = self.step = self.checkpointer.load(checkpoint) if checkpoint else 0
        self.request = StopRequest(group.device)
        self.timed: list[tuple[int, float]] = []  # steps and seconds of every window

    def require_room(self) -> None:
        steps, every = self.config.train.steps, self.config.train.checkpoint_every or self.config.train.steps
        num_saves = -(-steps // every) - self.first_step // every if self.first_step < steps else 0
        self.checkpointer.require_room(num_saves, overwrite=self.config.overwrite)

    def report_start(self, notes: list[str]) -> None:
        """Say what is about to run, and what is to be known of the checkpoint it goes on from."""
        config, group = self.config, self.group
        earlier = self.checkpointer.path and self.checkpointer.path.parent
        of_run: dict[str, Any] = {"first_step": self.first_step, "total_steps": config.train.steps}
        unit = self.corpus.vocabulary.unit
        writes, trackers = group.world_rank == 0, None
        if writes:
            saved = settings_of(config, group.world_size)
            trackers = Trackers(self.output_dir, self.first_step, config.train.wandb, saved)
        of_run |= {"earlier": earlier, "unit": unit, "trackers": trackers}
        self.reporter = Reporter(self.output_dir, enabled=writes, **of_run)
        for note in notes:
            self.reporter.note(note)
        if self.first_step:
            self.reporter.note(f"continuing {self.checkpointer.path} from step {self.first_step}")
        self.reporter.note(
            f"{config.model.name}: {self.model.num_parameters():,} parameters, {group.data_parallel} x "
            f"(ep={group.parallel.ep} x tp={group.parallel.tp}) ranks on {group.device.type}, "
            f"{len(self.corpus.train):,} {unit}s of {self.corpus.source}, {len(self.corpus.heldout):,} held out"
        )

    def run(self) -> dict[str, Any]:
        """Train, evaluate, save and report; once a rank is asked to stop, only save and report (collective)."""
        with self.request, self.checkpointer:
            with suppress(Stopped):
                self._train()
                return self._judge()
            if self.step < self.config.train.steps:
                self._save()
            result = {**self._facts(), "stopped": signal.SIGTERM.name}
            self.reporter.end(result)
            return result

    def _train(self) -> None:
        with profiler(self.config.train, self.output_dir, self.group.world_rank, self.first_step) as traced:
            self._take_steps(traced.step if traced else lambda: None)

    def _take_steps(self, ended: Callable[[], object]) -> None:
        settings, window, started = self.config.train, list[StepMetrics](), time.perf_counter()
        while self.step < settings.steps:
            self.step += 1
            unseen = len(window) if self.group.device.type == "cuda" else 0
            with self._divergence(self.step - unseen):
                # After a save that failed, all ranks stop after the same step, and ``_save`` says why.
                told_to_stop = self.request.told or self.checkpointer.failed
                metrics = self.train_step(self.step - 1, told_to_stop=told_to_stop)
                is_last = self.step == settings.steps
                stopped = self.request.agreed(metrics.told_to_stop) and not is_last
            ended()
            window.append(metrics)
            evaluate = not is_last and settings.eval_every and self.step % settings.eval_every == 0
            save = is_last or (settings.checkpoint_every and self.step % settings.checkpoint_every == 0)
            if len(window) < WINDOW_STEPS and not (stopped or evaluate or save):
                continue
            self._close_window(window, started)
            if stopped:
                raise Stopped
            if evaluate:
                self.evaluate()
            if save:
                self._save()
            window, started = [], time.perf_counter()

    def evaluate(self) -> float:
        """Report the held-out loss in nats per byte or token, and return it (collective)."""
        settings = self.config.train
        with self._divergence(self.step):
            sizes = {"num_batches": settings.eval_batches, "batch_size": settings.batch_size}
            loss = heldout_loss(self.model, self.group, self.corpus.heldout, **sizes, tell=self._tell)
            self.group.workspace.check()
        require(math.isfinite(loss), self._diverged(self.step, f"held-out loss={loss}"))
        self.reporter.heldout(self.step, loss)
        return loss

    def _judge(self) -> dict[str, Any]:
        """Judge the model, draw the sample, and report (collective)."""
        loss, settings = self.evaluate(), self.config.train
        prompt, vocabulary = self.corpus.heldout[:PROMPT_BYTES].tolist(), self.corpus.vocabulary
        draw = {"num_ids": settings.sample_bytes, "seed": settings.seed}
        sample = sample_text(self.model, self.group, prompt, vocabulary, **draw, tell=self._tell)
        self.group.workspace.check()
        result = {**self._facts(), f"heldout_nats_per_{vocabulary.unit}": loss}
        self.reporter.end(result, vocabulary.decode(prompt), sample)
        return result

    def _tell(self, text: str) -> None:
        """Show work other than steps; raise ``Stopped`` on all ranks once one is asked to stop (collective)."""
        self.reporter.tell(text)
        self.request.check()

    def _facts(self) -> dict[str, Any]:
        self.checkpointer.finish()
        config, group = self.config, self.group
        warm = self.timed[1:] or self.timed  # the first window compiled and captured
        tokens = sum(steps for steps, _ in warm) * self.train_step.tokens_per_step
        peak = peak_memory_bytes(group.device, group.workspace.num_bytes)
        took, took_warm = (sum(seconds for _, seconds in windows) for windows in (self.timed, warm))
        mine = [peak, took, took_warm, float(bool(self.train_step.graph_fallback_reason))]
        peak_memory, seconds, warm_seconds, any_eager = largest(mine, group.device, dist.group.WORLD)
        return {
            "task": "train",
            "model": config.model.name,
            "parameters": self.model.num_parameters(),
            "world_size": group.world_size,
            "ep": group.parallel.ep,
            "tp": group.parallel.tp,
            "data_parallel": group.data_parallel,
            "device": Machine.of(group.device).name,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "moe_path": next((layer.path for layer in self.model.moe_layers()), config.moe_path),
            "cuda_graph": not any_eager,
            "steps": self.step,
            **asdict(self._speed(tokens / warm_seconds if warm else 0.0)),
            "train_seconds": seconds,
            "peak_memory_bytes": int(peak_memory),
            "dropped_rows": sum(window.dropped_rows for window in self.reporter.history.windows),
            "output_dir": str(self.output_dir),
            "checkpoint": str(self.checkpointer.path),
        }

    def _save(self) -> None:
        """Write a checkpoint, unless it would put NaN where a good one is (collective)."""
        names = self.checkpointer.not_finite()
        what = f"NaN or Inf in {names[0]} and {len(names) - 1} other tensors, which are not saved" if names else ""
        require(not names, self._diverged(self.step, what))
        self.checkpointer.save(self.step)

    def _close_window(self, window: list[StepMetrics], started: float) -> None:
        """Wait for the device and record ``window``; everything after it may rely on finite losses."""
        first = self.step - len(window) + 1
        with self._divergence(first):
            losses, norms = torch.stack([torch.stack([each.loss, each.grad_norm]) for each in window]).T.tolist()
            seconds = time.perf_counter() - started
            self.group.workspace.check()
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=first):
            is_finite = math.isfinite(loss) and math.isfinite(norm)
            require(is_finite, self._diverged(step, f"loss={loss}, gradient norm={norm}"))
        self.timed.append((len(window), seconds))
        record = Window(
            step=self.step, losses=losses, grad_norms=norms,
            learning_rate=learning_rate(self.step - 1, self.config.train),
            expert_load=torch.stack([metrics.expert_load for metrics in window]).sum(0).tolist(),
            tokens_per_second=len(window) * self.train_step.tokens_per_step / seconds,
            dropped_rows=float(sum(metrics.dropped_rows for metrics in window)),
        )  # fmt: skip
        memory = peak_memory_bytes(self.group.device, self.group.workspace.num_bytes)
        self.reporter.window(record, memory, self._speed(record.tokens_per_second))

    def _speed(self, tokens_per_second: float) -> Speed:
        device, model = Machine.of(self.group.device).name, self.config.model
        return speed_of(model, tokens_per_second, self.group.world_size, device, self.model.dtype)

    @contextmanager
    def _divergence(self, first: int) -> Iterator[None]:
        """Let what the router says about NaN, of a step from ``first`` on, name the steps and the setting."""
        try:
            yield
        except NotFiniteError as error:
            raise ValueError(self._diverged(first, str(error))) from error
        except RuntimeError as error:
            if "device-side assert" not in str(error):
                raise
            raise ValueError(self._diverged(first, "the GPU says above what must be finite")) from error

    def _diverged(self, first: int, what: str) -> str:
        settings = self.config.train
        when = f"at step {self.step}" if first == self.step else f"at one of the steps {first} to {self.step}"
        return (
            f"training diverged {when} ({what}): train.lr={settings.lr} must be lower or "
            f"train.warmup_steps={settings.num_warmup_steps} higher; the last checkpoint is {self.checkpointer.path}"
        )


def _require_same(config: TrainJob, checkpoint: Checkpoint | None, text: str, world_size: int) -> list[str]:
    """Raise ``ValueError`` for settings other than the checkpoint's; return what else the user should know."""
    if checkpoint is None:
        return []
    saved, notes = read_settings(checkpoint.path) or {}, []
    require_same(saved, config, checkpoint.path, same_text=checkpoint.text == text)
    if gone := removed_settings(saved):
        notes.append(f"{checkpoint.path} was written with settings that no longer exist: {', '.join(gone)} left out")
    if (ranks := checkpoint.layout["world_size"]) != world_size:
        notes.append(f"{checkpoint.path} was written by {ranks} ranks: batches of {world_size} ranks are others")
    ep, tp = checkpoint.layout["ep"], checkpoint.layout["tp"]
    if config.model.moe.capacity_factor is not None and (ep, tp) != (config.parallel.ep, config.parallel.tp):
        ways = "in another layout model.moe.capacity_factor drops others"
        notes.append(f"{checkpoint.path} was written with ep={ep} tp={tp}: {ways}")
    return notes


def kept_layers(
    config: TrainJob, group: ExpertGroup, checkpoint: Checkpoint | None
) -> tuple[str, OverlapConfig | None, list[str]]:
    """Return path and split of the layers, and notes; a resumed run keeps those of its checkpoint, and so its bits.

    A run in another layout or on another device chooses for itself, and says so.
    """
    saved, replays = checkpoint.layers if checkpoint else {}, config.train.cuda_graph != "off"
    chosen = path_to_train(config.moe_path, config.model.moe, group, config.overlap, replays=replays)
    if checkpoint is None or not saved or config.moe_path != "auto" or config.overlap is not None:
        return chosen, config.overlap, []
    layout = {"world_size": group.world_size, "ep": group.parallel.ep, "tp": group.parallel.tp}
    drops_rows = config.model.moe.capacity_factor is not None  # The plain path drops none.
    where, nodes = (Machine.of(group.device).name, group.num_nodes, layout), saved.get("nodes", 1)
    is_same = (saved["device"], nodes, checkpoint.layout) == where
    if not is_same or (drops_rows and saved["path"] == "plain"):
        note = (
            f"{checkpoint.path} was written on {saved['device']} by path {saved['path']}, split {saved['overlap']}, "
            f"nodes of a group {nodes}"
        )
        return chosen, None, [f"{note}: here layers may take others, and results may differ in their last bits"]
    return saved["path"], saved["overlap"] and OverlapConfig(**saved["overlap"]), []


def profiler(settings: TrainConfig, folder: Path, rank: int, first_step: int) -> AbstractContextManager[Any]:
    """Return torch's profiler, which traces ``train.profile`` steps of this rank, or a context of ``None``."""
    if not settings.profile:
        return nullcontext()
    left = settings.steps - first_step - settings.profile - 1
    when = torch.profiler.schedule(wait=max(min(WINDOW_STEPS, left), 0), warmup=1, active=settings.profile, repeat=1)
    write = torch.profiler.tensorboard_trace_handler(str(folder / PROFILE), f"rank{rank}", use_gzip=True)
    return torch.profiler.profile(schedule=when, on_trace_ready=write)


TEMPERATURE = 0.8
Tell = Callable[[str], object]  # shows how far the work is; ``str`` shows nothing


@torch.no_grad()
def heldout_loss(
    model: GPT, group: ExpertGroup, text: Text | Tokens | Tensor, *, num_batches: int, batch_size: int, tell: Tell = str
) -> float:
    """Return the mean loss over evenly spread held-out sequences, the same for every layout of ranks (collective).

    Batch b goes to rank ``b % world_size``. A rank without a batch in the last round repeats the first one uncounted,
    because all ranks of a MoE group must call the model equally often. Capacity drops rows of these last ranks first.
    """
    windows = heldout_windows(text, num_windows=num_batches * batch_size, context=model.config.context)
    batches = windows.split(batch_size)
    total = torch.zeros(2, dtype=torch.float64, device=group.device)
    for first in range(0, len(batches), group.world_size):
        tell(f"evaluating, batch {first} of {len(batches)}")
        index = first + group.world_rank
        batch = batches[index if index < len(batches) else 0].to(group.device)
        logits = model(batch[:, :-1]).logits
        nats = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none").double().sum()
        if index < len(batches):
            total += torch.stack([nats, nats.new_tensor(batch[:, 1:].numel())])
    if group.world_size > 1:
        dist.all_reduce(total)
    nats_sum, num_targets = total.tolist()
    return float(nats_sum / num_targets)


@torch.no_grad()
def sample_text(
    model: GPT,
    group: ExpertGroup,
    prompt: list[int],
    vocabulary: Vocabulary,
    *,
    num_ids: int,
    seed: int,
    tell: Tell = str,
) -> bytes:
    """Continue ``prompt``, at least an id; every rank of a MoE group takes part and runs the same sequence."""
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for done in range(num_ids):
        tell(f"drawing a sample, {vocabulary.unit} {done} of {num_ids}")
        ids = torch.tensor([text[-model.config.context :]], device=group.device)
        logits = model(ids).logits[0, -1, : vocabulary.num_ids].cpu()
        text.append(int(torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)))
    return vocabulary.decode(text[len(prompt) :])
