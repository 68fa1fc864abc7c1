"""Settings of each task of the command line: one frozen dataclass a task, which checks itself.

A field declared here is a setting there. What needs the world size, the corpus or the device is checked where those are
known (``comet.training.trainer``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from comet import limits
from comet.config import OverlapConfig, ParallelConfig, require
from comet.jobs.generate import GenerateConfig
from comet.models.config import ModelConfig
from comet.schedule.table import token_bucket
from comet.utils.choices import CommBackend, GraphMode

if TYPE_CHECKING:
    import torch

    from comet.layer.group import ExpertGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureConfig(limits.Limited):
    """Which layers are measured, and how often.

    Args:
        models: Names of models, in the place of ``model``; none takes the job's.
        tokens: Tokens per rank, in any order; none takes those of a training step.
        rounds: Counted calls of every setting.
    """

    models: tuple[str, ...] = ()
    tokens: tuple[limits.Count, ...] = ()
    rounds: limits.Count = 20


@dataclass(frozen=True, kw_only=True)  # without slots, so that settings of more than this can inherit it
class ProfilesConfig(limits.Limited):
    """The folder of measurements.

    Args:
        profiles: Folder of the profiles that ``comet tune`` writes, one file per machine. What a profile measured takes
            the place of ``overlap`` where that is left open.
    """

    profiles: Annotated[str, limits.filled("the name of a folder")] = "outputs/profiles"


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneConfig(MeasureConfig, ProfilesConfig):
    """The shapes to tune, and the folder of measurements."""

    def __post_init__(self) -> None:
        limits.check(self)
        buckets: dict[int, int] = {}
        for num in self.tokens:
            other = buckets.setdefault(bucket := token_bucket(num), num)
            rule = f"must not hold both {other} and {num}: a profile keeps one entry, of bucket {bucket}, for them"
            require(other == num, f"tokens={self.tokens} {rule}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepConfig(MeasureConfig):
    """The points of a sweep: every combination of the lists; an empty list takes the value the job has elsewhere.

    All settings of a model, layout and number of tokens are timed in one loop, so that they can be compared. Their rows
    are written together. A later sweep in the folder keeps rows of the same ranks, backend, version of Comet, kernels
    and ``rounds``, and measures settings that failed. With a new setting it measures all of them again.

    Args:
        layouts: Pairs (EP, TP); none takes the job's.
        comm_blocks: Thread blocks that only communicate at first; 0: communication is colocated with compute; none
            takes ``overlap.comm_blocks``, which is left out then.
        num_panels: Column panels of layer 1; none takes the job's.
    """

    layouts: tuple[tuple[limits.Count, ...], ...] = ()
    comm_blocks: tuple[limits.Natural, ...] = (0, 4, 8, 16, 32, 64)
    num_panels: tuple[limits.Count, ...] = ()

    def __post_init__(self) -> None:
        limits.check(self)
        pairs = all(len(layout) == 2 for layout in self.layouts)
        require(pairs, f"layouts={list(self.layouts)} must each be a pair [ep, tp]")


Folder = Annotated[str, limits.filled("the name of a folder")]
MoEPath = Literal["auto", "fused", "twin", "plain", "reference"]
TrainDtype = Literal["auto", "float32", "bfloat16"]
MOST_S = 1_000_000
MOST_WARMUP_STEPS = 60  # the default is never longer
WANDB = limits.Limit(
    lambda value, _: value and find_spec("wandb") is not None,
    "the name of a project, with the package wandb installed",
    advice="pip install wandb",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommConfig(limits.Limited):
    """How ranks reach each other's memory.

    Args:
        backend: ``auto``, or the name of a communicator (``nvshmem``, ``symm_mem``, ``cpu_shm``).
        timeout_s: Deadline of every wait for another rank, in seconds.
    """

    backend: CommBackend = "auto"
    timeout_s: Annotated[float, limits.above(0), limits.at_most(MOST_S)] = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings(limits.Limited):
    """How ``comet`` starts the ranks of this machine; under torchrun its own options say that.

    Args:
        max_restarts: How often all ranks are started again, from the newest checkpoint, after one of them failed.
    """

    max_restarts: limits.Natural = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig(limits.Limited):
    """The tokens of a training step.

    Args:
        batch_size: Sequences per rank and pass; a step of training has ``train.gradient_accumulation_steps`` passes.
        dtype: Of activations; ``auto`` is bfloat16 on a GPU and float32 on a CPU, and a resumed run keeps it.
            Parameters stay float32.
    """

    batch_size: limits.Count = 4
    dtype: TrainDtype = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(StepConfig):
    """Length, optimizer and bookkeeping of a run.

    Args:
        steps: Optimizer steps in all, those before a resume included.
        gradient_accumulation_steps: Passes of ``batch_size`` sequences per rank and step, whose gradients are summed;
            the loss is the mean over the tokens of all passes.
        gradient_checkpointing: Whether the backward pass computes each block again, so that only the inputs of the
            blocks are kept from the forward pass.
        fsdp: Whether ``torch.distributed.fsdp.fully_shard`` shares out all parameters but the experts, with their
            gradients and moments, among all ranks; gradients are reduced during the backward pass.
        lr: Learning rate after warm-up.
        min_lr_ratio: The cosine ends at ``min_lr_ratio * lr``.
        warmup_steps: Steps of linear warm-up; ``None`` is a tenth of them, but at most 60.
        weight_decay: AdamW decay of matrices; gains and biases are not decayed.
        grad_clip: Largest global gradient norm.
        seed: Of the weights and of the batches.
        eval_batches: Held-out batches of ``batch_size`` sequences per evaluation, shared out among the ranks.
        eval_every: Steps between evaluations; 0 evaluates at the end only.
        checkpoint_every: Steps between checkpoints, of which the newest two are kept; 0 saves at the end only.
        async_save: Whether the files of checkpoints are written in the background, from a copy in host memory.
        sample_bytes: Bytes, or tokens of a tokenizer, of the text generated at the end; 0 generates none.
        profile: Steps in a trace of torch's profiler, which each rank writes to ``profile/`` in the output folder; in
            a long run they come after the first window of 10 steps. 0 writes none.
        wandb: Project of Weights & Biases that gets the scalars of TensorBoard, too.
        cuda_graph: Whether the forward and backward pass of a step are replayed from one CUDA graph: ``auto``: if
            possible; ``on``: an error if it is not; ``off``: never. A graph is faster with few tokens; it keeps the
            memory of one forward and backward pass between steps.
    """

    steps: limits.Count = 800
    gradient_accumulation_steps: limits.Count = 1
    gradient_checkpointing: bool = False
    fsdp: bool = False
    lr: limits.Positive = 4e-3
    min_lr_ratio: limits.Share = 0.1
    warmup_steps: Annotated[int, limits.at_least(0), limits.below("steps")] | None = None
    weight_decay: limits.NonNegative = 0.1
    grad_clip: Annotated[float, limits.above(0), limits.OR_INFINITE] = 1.0
    seed: Annotated[int, limits.at_least(0), limits.below(2**63)] = 0
    eval_batches: limits.Count = 64
    eval_every: limits.Natural = 200
    checkpoint_every: limits.Natural = 200
    async_save: bool = False
    sample_bytes: limits.Natural = 80
    profile: Annotated[int, limits.at_least(0), limits.below("steps")] = 0
    wandb: Annotated[str, WANDB] | None = None
    cuda_graph: GraphMode = "auto"

    @property
    def num_warmup_steps(self) -> int:
        """Steps of warm-up; of 5, 200 and 800 steps 0, 20 and 60, if ``warmup_steps`` does not say."""
        return min(self.steps // 10, MOST_WARMUP_STEPS) if self.warmup_steps is None else self.warmup_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(limits.Limited):
    """The text.

    Args:
        path: A file, a pattern as ``texts/*.jsonl``, or a folder all of whose files are read, of links and copies the
            first, but those whose names begin with a dot; ``None`` reads the source of the Python standard library of
            the running interpreter.
        heldout_fraction: Share of the bytes or tokens kept out of training.
        tokenizer: A folder with a Hugging Face tokenizer, or a file ``tokenizer.json``; files are read as text, as
            JSONL or as parquet, as their names end. ``None`` trains on the bytes of files of any kind.
        text_field: With a tokenizer, name of the field or column of JSONL and parquet files that holds the text.
        end_token: With a tokenizer, the token that follows each document; ``None`` takes the tokenizer's own.
    """

    path: Annotated[str, limits.filled("the name of a file or folder")] | None = None
    heldout_fraction: Annotated[float, limits.above(0), limits.below(1)] = 0.05
    tokenizer: Annotated[str, limits.filled("the name of a folder or file")] | None = None
    text_field: Annotated[str, limits.filled("the name of a field")] = "text"
    end_token: Annotated[str, limits.filled("a token")] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModularConfig:
    """The pair of parts that the task ``modular`` compares with the fused layer.

    Args:
        pair: Names of a prepare/finalize and of experts (see ``comet.modular``); none: nothing is run.
        tokens: Tokens per rank; ``None`` takes those of a training step.
        rounds: Counted calls of either.
    """

    pair: tuple[str, ...] = ()
    tokens: limits.Count | None = None
    rounds: limits.Count = 20

    def __post_init__(self) -> None:
        limits.check(self)
        require(len(self.pair) in (0, 2), f"pair={list(self.pair)} must be two names, [PREPARE_FINALIZE,EXPERTS]")


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """The settings of every task.

    Args:
        nproc: Ranks to start on this machine; ``None`` starts one on every GPU that the experts divide over, or two on
            a machine without.
    """

    parallel: ParallelConfig
    comm: CommConfig = field(default_factory=CommConfig)
    nproc: limits.Count | None = None
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    model: ModelConfig

    def __post_init__(self) -> None:
        limits.check(self)
        self.parallel.check(self.model.moe)


@dataclass(frozen=True, kw_only=True)
class StepJob(JobConfig):
    """The settings of tasks whose tokens are those of a training step, unless a task's own settings say more."""

    train: StepConfig = field(default_factory=StepConfig)

    @property
    def step_tokens(self) -> int:
        return self.train.batch_size * self.model.context


@dataclass(frozen=True, kw_only=True)
class ModelJob(JobConfig):
    """The settings of tasks that run a whole model.

    Args:
        moe_path: How the MoE layers run (see ``comet.moe.MoE``).
    """

    moe_path: MoEPath = "auto"
    tune: ProfilesConfig = field(default_factory=ProfilesConfig)
    overlap: OverlapConfig | None = None


@dataclass(frozen=True, kw_only=True)
class TrainJob(ModelJob, StepJob):
    """The settings of ``comet train``.

    Args:
        output_dir: Folder of checkpoints, metrics and pictures; made if missing.
        overwrite: Whether a run that ``output_dir`` holds may be removed.
        resume: ``None`` starts a new run; ``auto`` continues from the newest complete checkpoint of ``output_dir``,
            which must be named then, if there is one; otherwise a checkpoint, or the output folder of another run.
        resume_changes: Settings that may differ from those of the run that is continued, as ``train.lr``.
    """

    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    output_dir: Folder = "outputs/train-${now:%Y%m%d-%H%M%S}"
    overwrite: bool = False
    resume: Annotated[str, limits.filled("auto, a checkpoint or an output folder")] | None = None
    resume_changes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        text = self.data.path
        require(
            text is None or not Path(self.output_dir).resolve().is_relative_to(Path(text).resolve()),
            f"output_dir={self.output_dir!r} must not be in data.path={text!r}: a resumed run would read its own files",
        )


@dataclass(frozen=True, kw_only=True)
class GenerateJob(ModelJob):
    """The settings of ``comet generate``."""

    generate: GenerateConfig = field(default_factory=GenerateConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generate.speculate != "off":
            layers = self.model.num_layers - self.model.dense_layers
            self.generate.experts_per_layer(self.model.moe.top_k, layers)


@dataclass(frozen=True, kw_only=True)
class TuneJob(StepJob):
    """The settings of ``comet tune``."""

    tune: TuneConfig = field(default_factory=TuneConfig)


@dataclass(frozen=True, kw_only=True)
class SweepJob(StepJob):
    """The settings of ``comet sweep``.

    Args:
        output_dir: Folder of the table and the picture; made if missing, else the sweep there is continued.
    """

    sweep: SweepConfig = field(default_factory=SweepConfig)
    output_dir: Folder = "outputs/sweep-${now:%Y%m%d-%H%M%S}"
    overlap: OverlapConfig | None = None


@dataclass(frozen=True, kw_only=True)
class ModularJob(StepJob):
    """The settings of ``comet modular``.

    Args:
        output_dir: Folder of the trace; made if missing.
        overwrite: Whether the trace of an earlier run may be replaced.
    """

    modular: ModularConfig = field(default_factory=ModularConfig)
    output_dir: Folder = "outputs/modular-${now:%Y%m%d-%H%M%S}"
    overwrite: bool = False
    overlap: OverlapConfig | None = None


def model_group(config: ModelJob, device: torch.device, *, max_tokens: int, dtype: torch.dtype) -> ExpertGroup:
    """Join the MoE group of the job's model, whose layers take what ``tune`` measured (collective)."""
    from comet.layer.group import make_expert_group

    return make_expert_group(
        config.model.moe, config.parallel, max_tokens=max_tokens, dtype=dtype, device=device,
        backend=config.comm.backend, timeout_s=config.comm.timeout_s, profiles=config.tune.profiles,
    )  # fmt: skip


def activation_dtype(name: str, device: torch.device) -> torch.dtype:
    """The element type of activations: ``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    import torch

    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
