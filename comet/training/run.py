"""The training job: text and checkpoint in, model trained over all ranks, report out."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from comet.config import require
from comet.group import ExpertGroup, make_expert_group
from comet.models.gpt import GPT
from comet.training.checkpoint import Checkpointer
from comet.training.checkpoint_folder import Checkpoint, choose_checkpoint
from comet.training.config import JobConfig
from comet.training.data import Corpus, read_corpus
from comet.training.evaluate import generate, heldout_loss
from comet.training.history import Window
from comet.training.loop import StepMetrics, Trainer, deterministic
from comet.training.optimizer import learning_rate, make_optimizer
from comet.training.report import Reporter, peak_memory_bytes

WINDOW_STEPS = 10
PROMPT_BYTES = 32


class RankContext(Protocol):
    """Who this process is; the process group is initialised when there are several ranks."""

    @property
    def rank(self) -> int:
        """Rank in the whole job."""
        ...

    @property
    def world_size(self) -> int:
        """Ranks in the whole job."""
        ...

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        ...


def train(config: JobConfig, context: RankContext) -> dict[str, Any]:
    """Train, evaluate and report (collective).

    After an error the ranks' shared memory is left to the end of the process, because closing it is collective.

    Args:
        config: The job.
        context: This rank.

    Returns:
        The result, equal on all ranks; rank 0 has printed it as the last line of standard output.

    Raises:
        ValueError: If the text, the checkpoint or a setting cannot be used, or the training diverged.
        FileNotFoundError: If the text or the checkpoint is missing.
    """
    corpus = read_corpus(config.data, config.model.context)
    checkpoint, skipped = choose_checkpoint(config.resume, config.output_dir)
    if checkpoint is not None:
        checkpoint.check_model(config.model)
    group = make_expert_group(
        config.model.moe,
        config.parallel,
        max_tokens=config.train.batch_size * config.model.context,
        dtype=activation_dtype(config.train.dtype, context.device),
        device=context.device,
        backend=config.comm.backend,
        timeout_s=config.comm.timeout_s,
        profiles=config.tune.profiles,
    )
    _check_same_text(corpus, group)
    with deterministic(context.device):
        job = Job(config, group, corpus, checkpoint)
        job.report_start(skipped)
        job.run_steps()
        result = job.finish()
    group.close()
    return result


class Job:
    """A training job whose ranks, text and checkpoint are in place.

    Args:
        config: The job.
        group: The ranks.
        corpus: The text.
        checkpoint: What to continue from, if anything.
    """

    def __init__(self, config: JobConfig, group: ExpertGroup, corpus: Corpus, checkpoint: Checkpoint | None) -> None:
        self.config = config
        self.group = group
        self.corpus = corpus
        self.output_dir = Path(config.output_dir)
        self.model = GPT(config.model, group, path=config.moe_path, overlap=config.overlap, seed=config.train.seed)
        optimizer = make_optimizer(self.model, config.train)
        self.trainer = Trainer(self.model, optimizer, group, corpus.train, config.train)
        self.checkpointer = Checkpointer(self.output_dir, self.model, optimizer, group)
        self.checkpoint_path = checkpoint.path if checkpoint else None
        self.first_step = self.checkpointer.load(checkpoint) if checkpoint else 0
        self.steps_timed, self.seconds = 0, 0.0
        self.reporter = Reporter(
            self.output_dir,
            enabled=group.world_rank == 0,
            first_step=self.first_step,
            total_steps=config.train.steps,
            earlier=self.checkpoint_path.parent if self.checkpoint_path else None,
        )

    def report_start(self, skipped: list[str]) -> None:
        """Say what is about to run, and which broken checkpoints were passed over."""
        config, group = self.config, self.group
        for reason in skipped:
            self.reporter.note(f"skipped: {reason}")
        if self.first_step:
            self.reporter.note(f"continuing {self.checkpoint_path} from step {self.first_step}")
        self.reporter.note(
            f"{config.model.name}: {self.model.num_parameters():,} parameters, {group.data_parallel} x "
            f"(ep={group.parallel.ep} x tp={group.parallel.tp}) ranks on {group.device.type}, "
            f"{len(self.corpus.train):,} bytes of {self.corpus.source}, {len(self.corpus.heldout):,} held out"
        )

    def run_steps(self) -> None:
        """Train to the last step, evaluating and saving on the way."""
        settings = self.config.train
        window: list[StepMetrics] = []
        started = time.perf_counter()
        for done in range(self.first_step + 1, settings.steps + 1):
            window.append(self.trainer.step(done - 1))
            evaluate = _is_due(done, settings.eval_every) and done < settings.steps
            save = _is_due(done, settings.checkpoint_every) or done == settings.steps
            if len(window) < WINDOW_STEPS and not (evaluate or save):
                continue
            self._close_window(done, window, started)
            if evaluate:
                self.reporter.heldout(done, self.evaluate())
            if save:
                self.checkpoint_path = self.checkpointer.save(done)
            window, started = [], time.perf_counter()

    def evaluate(self) -> float:
        """Held-out loss in nats per byte (collective)."""
        settings = self.config.train
        return heldout_loss(
            self.model,
            self.group,
            self.corpus.heldout,
            num_batches=settings.eval_batches,
            batch_size=settings.batch_size,
        )

    def finish(self) -> dict[str, Any]:
        """Judge the model, draw the sample, and report (collective)."""
        config, group = self.config, self.group
        loss = self.evaluate()
        self.reporter.heldout(max(self.first_step, config.train.steps), loss)
        prompt = bytes(self.corpus.heldout[:PROMPT_BYTES].tolist())
        sample = generate(self.model, group, prompt, num_bytes=config.train.sample_bytes, seed=config.train.seed)
        tokens = self.steps_timed * self.trainer.tokens_per_step
        peak_memory, seconds, any_eager = self._slowest()
        result = {
            "task": "train",
            "model": config.model.name,
            "parameters": self.model.num_parameters(),
            "world_size": group.world_size,
            "ep": group.parallel.ep,
            "tp": group.parallel.tp,
            "data_parallel": group.data_parallel,
            "device": _device_name(group.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "moe_path": config.moe_path,
            "cuda_graph": not any_eager,
            "steps": max(self.first_step, config.train.steps),
            "heldout_nats_per_byte": loss,
            "tokens_per_second": tokens / seconds if seconds else 0.0,
            "train_seconds": seconds,
            "peak_memory_bytes": peak_memory,
            "dropped_rows": sum(window.dropped_rows for window in self.reporter.history.windows),
            "output_dir": str(self.output_dir),
            "checkpoint": str(self.checkpoint_path),
        }
        self.reporter.finish(result, prompt, sample)
        return result

    def _close_window(self, done: int, window: list[StepMetrics], started: float) -> None:
        """Wait for the device and record ``window``; everything after it may rely on finite weights."""
        losses = torch.stack([metrics.loss for metrics in window]).tolist()
        norms = torch.stack([metrics.grad_norm for metrics in window]).tolist()
        seconds = time.perf_counter() - started
        self.group.workspace.check()
        settings = self.config.train
        self._check_finite(done - len(window) + 1, losses, norms)
        self.steps_timed += len(window)
        self.seconds += seconds
        record = Window(
            step=done,
            losses=losses,
            grad_norms=norms,
            learning_rate=learning_rate(done - 1, settings),
            expert_load=torch.stack([metrics.expert_load for metrics in window]).sum(0).tolist(),
            tokens_per_second=len(window) * self.trainer.tokens_per_step / seconds,
            dropped_rows=float(sum(metrics.dropped_rows for metrics in window)),
        )
        self.reporter.window(record, peak_memory_bytes(self.group.device, self.group.workspace.num_bytes))

    def _check_finite(self, first: int, losses: list[float], norms: list[float]) -> None:
        settings = self.config.train
        for step, values in enumerate(zip(losses, norms, strict=True), start=first):
            require(
                all(map(math.isfinite, values)),
                f"training diverged at step {step} (loss={values[0]}, gradient norm={values[1]}): "
                f"train.lr={settings.lr} must be lower or train.warmup_steps={settings.num_warmup_steps} higher",
            )

    def _slowest(self) -> tuple[int, float, bool]:
        """Peak memory in bytes, seconds of training, whether steps were not replayed; each of any rank (collective)."""
        peak = peak_memory_bytes(self.group.device, self.group.workspace.num_bytes)
        mine = [peak, self.seconds, float(bool(self.trainer.why_eager))]
        largest = torch.tensor(mine, dtype=torch.float64, device=self.group.device)
        if self.group.world_size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        peak, seconds, any_eager = largest.tolist()
        return int(peak), seconds, bool(any_eager)


def activation_dtype(name: str, device: torch.device) -> torch.dtype:
    """The element type of activations: ``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _check_same_text(corpus: Corpus, group: ExpertGroup) -> None:
    """Raise ``ValueError`` unless all ranks read the same bytes (nodes may differ in files or Python version)."""
    if group.world_size == 1:
        return
    digests: list[Any] = [None] * group.world_size
    dist.all_gather_object(digests, corpus.digest())
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    require(not different, f"{corpus.source} must be the same on all ranks, but differs between rank 0 and {different}")


def _is_due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
