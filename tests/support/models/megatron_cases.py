"""Small Megatron models, each with a twin that uses Comet, also on CPU ranks, which Megatron-core does not support.

Models that train are in bf16 and compared with a Megatron model in float32.
"""

import contextlib
import random
import runpy
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.overrides import TorchFunctionMode

from comet.config import ParallelConfig
from comet.integrations.megatron import from_sequential, moe_config, with_comet
from comet.layer.group import ExpertGroup, make_expert_group

SEQUENCE, BATCH, VOCABULARY = 6, 3, 64
Layout = tuple[int, int, int]  # EP, expert TP, TP
RATE = 0.02
BUCKET = 1000  # so small that each parameter's gradient is reduced as soon as it exists
DELAY_CYCLES = 2_000_000  # a millisecond, longer than a layer takes
FIELDS: dict[str, Any] = dict(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    ffn_hidden_size=64,
    moe_ffn_hidden_size=48,
    num_moe_experts=4,
    moe_router_topk=2,
    moe_aux_loss_coeff=0.5,
    moe_z_loss_coeff=0.1,
    moe_shared_expert_intermediate_size=32,
    gated_linear_unit=True,
    activation_func=silu,
    add_bias_linear=False,
    init_method_std=0.3,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    use_cpu_initialization=True,
    gradient_accumulation_fusion=False,
    bias_activation_fusion=False,
    bias_dropout_fusion=False,
    masked_softmax_fusion=False,
    normalization="RMSNorm",
)


class AsGpu(TorchFunctionMode):
    """Tensors that Megatron makes on "cuda" are made on the CPU, and call their types those of GPUs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = args[0] if func is Tensor.cuda else func(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if func is Tensor.type and isinstance(found, str) else found


def use_cpu() -> None:
    """Let this process run Megatron-core without a GPU."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.Stream = torch.cuda.current_stream = MagicMock  # type: ignore[misc,assignment]
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.stream = contextlib.nullcontext  # type: ignore[misc,assignment]
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, **kwargs: (  # on CPUs it forgets about numpy
        tensor.numpy() if torch.is_tensor(tensor) and tensor.dim() else tensor
    )
    random._CUDA_RNG_STATE_TRACKER = MagicMock()  # its ``fork`` is a context that does nothing
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    random._get_all_rng_states, random._set_all_rng_states = tuple, lambda *states: None


def let_optimizers_run() -> None:
    """Let this process run Megatron's optimizers without a GPU, and load what they saved without Transformer Engine.

    torch's Adam has a state once it has stepped, and counts steps by parameter, for which a checkpoint has one number.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    describe, put = DistributedOptimizer.sharded_state_dict, DistributedOptimizer._set_main_param_and_optimizer_states

    def sharded_state_dict(self: Any, model: Any, is_loading: bool = False, **settings: Any) -> Any:
        if is_loading and not self.optimizer.state:
            self.step()
        return describe(self, model, is_loading, **settings)

    def put_states(self: Any, parameter: Any, tensors: Any) -> None:
        own = self._get_main_param_and_optimizer_states(parameter)
        own["step"] = self.optimizer.state[own["param"]]["step"] = own["step"].clone()
        put(self, parameter, {**own, **tensors})

    AsGpu().__enter__()
    DistributedOptimizer.sharded_state_dict = sharded_state_dict
    DistributedOptimizer._set_main_param_and_optimizer_states = put_states


class Works(list[Any]):
    """Several operations of a process group, to be waited for as one."""

    def wait(self) -> None:
        for work in self:
            work.wait()


def all_reduce_each(group: Any, tensors: list[Tensor], options: Any) -> Works:
    """In place of one operation for all tensors, with which Megatron reduces gradients and gloo has none for GPUs."""
    each = dist.AllreduceOptions()
    each.reduceOp = options.reduceOp
    return Works(group.allreduce([tensor], each) for tensor in tensors)


def let_run(device: str = "cpu") -> None:
    """Let this process run Megatron-core without Transformer Engine, and on a CPU."""
    from megatron.core.transformer.moe import moe_utils

    if not moe_utils.HAVE_TE:
        moe_utils.te_general_gemm = None  # Megatron-core 0.16.1 leaves this name undefined
    torch.compiler.set_stance("force_eager")  # compiling a few lines of the router takes longer than a test
    if device == "cpu":
        use_cpu()


def start(ep: int, expert_tp: int = 1, tp: int = 1, device: str = "cpu") -> None:
    """Megatron's process groups and seeds, in fresh ones after an earlier start."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    let_run(device)
    if device != "cpu" and "cuda:gloo" in dist.get_backend_config():  # ranks that share a GPU
        dist.ProcessGroup.allreduce_coalesced = all_reduce_each  # type: ignore[method-assign]
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=expert_tp,
        create_gloo_process_groups=False,
    )
    if device != "cpu":
        model_parallel_cuda_manual_seed(7, force_reset_rng=True)


def make_config(**changes: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    tp = parallel_state.get_tensor_model_parallel_world_size()
    sizes = dict(
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
    )
    return TransformerConfig(**{**FIELDS, **sizes, **changes})


def make_group(config: Any, node_size: int | None = None, **changes: Any) -> ExpertGroup:
    ep, tp = config.expert_model_parallel_size, config.expert_tensor_parallel_size
    parallel = ParallelConfig(ep=ep, tp=tp, node_size=node_size)
    settings: dict[str, Any] = dict(max_tokens=SEQUENCE * BATCH, dtype=torch.float32, device="cpu")
    return make_expert_group(moe_config(config), parallel, **{**settings, **changes})


def stock_spec(config: Any) -> Any:
    """The spec of a transformer layer whose experts are Megatron's ``SequentialMLP``."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, normalization=config.normalization
    )


def make_layer(config: Any, spec: Any) -> Any:
    from megatron.core.transformer.spec_utils import build_module

    torch.manual_seed(5)
    mlp = spec.submodules.mlp
    layer = mlp(config=config) if isinstance(mlp, partial) else build_module(mlp, config=config)
    layer.set_layer_number(1)
    return layer


def make_gpt(config: Any, spec: Any, vocabulary: int = VOCABULARY, sequence: int = SEQUENCE) -> Any:
    from megatron.core.models.gpt import GPTModel

    torch.manual_seed(6)
    return GPTModel(config, spec, vocab_size=vocabulary, max_sequence_length=sequence)


@torch.no_grad()
def draw_experts(model: nn.Module, seed: int, std: float) -> None:
    """Other weights for each local expert of every rank, of which Megatron makes copies on CPUs."""
    generator = torch.Generator().manual_seed(100 + seed)
    for name, parameter in model.named_parameters():
        if ".local_experts." in name or name.startswith("local_experts."):
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))


def twins(make: Any, config: Any, group: ExpertGroup, seed: int, **settings: Any) -> tuple[Any, Any]:
    """Return two models of ``make`` with the same weights: of Megatron's spec, and of the spec with Comet."""
    spec = stock_spec(config)
    stock, ours = make(config, spec), make(config, with_comet(spec, group, **settings))
    draw_experts(stock, seed, config.init_method_std)
    ours.load_state_dict(from_sequential(stock.state_dict()))
    return stock, ours


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(grad is not None for grad in found.values()), [name for name, grad in found.items() if grad is None]
    return found  # type: ignore[return-value]


def begin(ep: int, device: str, fields: dict[str, Any]) -> tuple[Any, ExpertGroup]:
    """A configuration, in bf16 on GPUs, whose process groups are started, and Comet's group."""
    start(ep, device=device)
    on_gpu = dict(bf16=True, params_dtype=torch.bfloat16, use_cpu_initialization=False)
    config = make_config(**fields, **({} if device == "cpu" else on_gpu))
    return config, make_group(config, device=device, dtype=config.params_dtype)


def save_and_load(rank: int, world_size: int, folder: Path, device: str, fields: dict[str, Any] | None = None) -> None:
    """Checkpoints of each model read by the other, then by Comet on one EP shard per rank less."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    config, group = begin(world_size, device, fields or {})
    stock, ours = twins(make_gpt, config, group, rank)
    expected = {name: value.clone() for name, value in ours.state_dict().items() if torch.is_tensor(value)}
    for name, model in (("stock", stock), ("ours", ours)):
        if rank == 0:
            (folder / name).mkdir()
        dist.barrier()
        dist_checkpointing.save(model.sharded_state_dict(), str(folder / name))

    def read(model: Any, name: str) -> dict[str, Tensor]:
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        missing = model is stock and name == "ours"  # the extra states of its experts, which are all empty
        strict = StrictHandling.LOG_UNEXPECTED if missing else StrictHandling.RAISE_UNEXPECTED
        wanted = model.sharded_state_dict()
        model.load_state_dict(dist_checkpointing.load(wanted, str(folder / name), strict=strict), strict=not missing)
        return from_sequential(model.state_dict())

    for name in ("stock", "ours"):
        for model in (stock, ours):
            found = read(model, name)
            for key, value in expected.items():
                assert torch.equal(found[key], value), f"{key} of {name} read by {type(model).__name__}"
    group.close()
    check_wider(folder, read, expected, device, fields or {})


def check_wider(folder: Path, read: Any, expected: dict[str, Tensor], device: str, fields: dict[str, Any]) -> None:
    """The checkpoint of two EP shards in a model that holds all experts."""
    config, group = begin(1, device, fields)
    model = make_gpt(config, with_comet(stock_spec(config), group))
    found = read(model, "ours")
    for key, value in expected.items():
        gathered = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, value)
        whole = torch.cat(gathered) if ".mlp.experts." in key else value
        assert torch.equal(found[key], whole), key
    group.close()


@dataclass(frozen=True)
class Size:
    hidden: int
    vocabulary: int
    sequence: int
    batch: int

    def fields(self) -> dict[str, Any]:
        """For ``make_config``: weights of which a layer adds little to its input (see ``clear_tokens``)."""
        return dict(
            hidden_size=self.hidden,
            ffn_hidden_size=self.hidden,
            moe_ffn_hidden_size=self.hidden // 2,
            moe_shared_expert_intermediate_size=self.hidden,
            num_moe_experts=8,
            moe_aux_loss_coeff=0.02,
            moe_z_loss_coeff=0.01,
            init_method_std=0.32 / self.hidden**0.5,
        )


def draw_batch(size: Size, seed: int, device: str) -> dict[str, Tensor]:
    """Arguments of a model's forward pass."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(size.vocabulary, (size.batch, size.sequence + 1), generator=generator).to(device)
    return dict(
        input_ids=tokens[:, :-1].contiguous(),
        position_ids=torch.arange(size.sequence, device=device).expand(size.batch, -1),
        attention_mask=torch.ones(1, 1, size.sequence, size.sequence, device=device).triu(1).bool(),
        labels=tokens[:, 1:].contiguous(),
    )


class Trainee:
    """A model under Megatron's data parallelism, which reduces gradients while the rest of them is computed.

    Plain gradient descent on float32 copies of the weights.
    """

    def __init__(self, config: Any, model: nn.Module) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer.module import Float16Module

        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True, bucket_size=BUCKET)
        for name, parameter in model.named_parameters():
            if ".local_experts." in name:  # without, 0.16.1 mixes the parts of an expert whose TP is not the model's
                parameter.allreduce = False  # type: ignore[attr-defined]
        whole = Float16Module(config, model) if config.bf16 else model
        self.parallel = DistributedDataParallel(config, settings, whole)
        self.parameters = dict(model.named_parameters())
        self.weights = {name: parameter.detach().float().clone() for name, parameter in self.parameters.items()}

    def step(self, batch: dict[str, Tensor], late: random.Random) -> dict[str, Tensor]:
        """One step; returns each token's loss and all gradients, those of experts as Comet has them.

        Before the forward and the backward pass a GPU sleeps for some cycles.
        """
        from megatron.core.distributed import finalize_model_grads

        self.parallel.zero_grad_buffer()
        device = batch["labels"].device
        sleep(device, late.randrange(DELAY_CYCLES))
        found = self.parallel(**batch)
        sleep(device, late.randrange(DELAY_CYCLES))
        found.mean().backward()
        finalize_model_grads([self.parallel])
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.weights[name].sub_(RATE * parameter.main_grad))  # type: ignore[attr-defined]
        grads = {name: parameter.main_grad.clone() for name, parameter in self.parameters.items()}  # type: ignore[attr-defined]
        return {**from_sequential(grads), "loss": found.detach()}


class Deviations:
    """How far Megatron's and Comet's values in bf16 are from those in float32: sums of squares by name."""

    def __init__(self) -> None:
        self.squares: dict[str, Tensor] = {}

    def add(self, exact: dict[str, Tensor], stock: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
        assert exact.keys() == stock.keys() == ours.keys()
        for name, value in exact.items():
            found = torch.stack([other[name].double() for other in (exact, stock, ours)])
            found[1:] -= value.double()
            self.squares[name] = self.squares.get(name, 0) + found.flatten(1).square().sum(1)

    def check(self) -> None:
        """Comet's are at most twice as far as Megatron's, which are not far."""
        for name, (norm, stock, ours) in ((name, square.sqrt().tolist()) for name, square in self.squares.items()):
            assert stock <= 0.05 * norm, f"{name}: {stock} is no rounding of values of norm {norm}"
            assert ours <= 2 * stock, f"{name} of norm {norm}: error {ours} is more than twice Megatron's {stock}"


def sleep(device: torch.device, cycles: int) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(cycles)


def make_clear(config: Any, spec: Any, size: Size, device: str) -> nn.Module:
    """A model of that size in which rounding does not change who computes a token."""
    model = make_gpt(config, spec, size.vocabulary, size.sequence).to(device)  # Megatron leaves positions on the CPU
    experts, parameters = config.num_moe_experts, dict(model.named_parameters())
    with torch.no_grad():
        words = parameters["embedding.word_embeddings.weight"]
        words.copy_(clear_tokens(*words.shape, experts, seed=1))
        parameters["embedding.position_embeddings.weight"][:, :experts] = 0
        for name, parameter in parameters.items():
            if name.endswith("mlp.router.weight"):
                parameter.copy_(clear_router(*parameter.shape))
    return model


def clear_tokens(count: int, hidden: int, num_experts: int, seed: int) -> Tensor:
    """Return tokens ``(count, hidden)`` whose choice of experts is too clear for roundings to change.

    The first elements become the experts' logits: equal steps in any order, large compared with a layer's output.
    """
    steps, draw = torch.linspace(-4, 4, num_experts), torch.Generator().manual_seed(seed)
    orders = torch.rand(count, num_experts, generator=draw).argsort(dim=1)
    return torch.cat([steps[orders], torch.randn(count, hidden - num_experts, generator=draw)], dim=1)


def clear_router(num_experts: int, hidden: int) -> Tensor:
    return 0.5 * torch.eye(num_experts, hidden)


def train_beside_megatron(
    rank: int, world_size: int, size: Size, layouts: list[Layout], steps: int, device: str
) -> None:
    """In each layout steps of three models with the same weights, each rank late by another time in each.

    Layers compute forward once more for the backward pass.
    """
    recompute = dict(recompute_granularity="selective", recompute_modules=["moe"])
    for layout in layouts:
        start(*layout, device)
        fields = dict(size.fields(), use_cpu_initialization=device == "cpu", **recompute)
        config, wide = make_config(**fields, bf16=True, params_dtype=torch.bfloat16), make_config(**fields)
        group = make_group(
            config, max_tokens=size.sequence * size.batch, dtype=torch.bfloat16, device=device, timeout_s=20.0,
            reserved_sms=0 if device == "cpu" else 32,
        )  # fmt: skip
        make = partial(make_clear, size=size, device=device)
        stock, ours = twins(make, config, group, rank)
        models = [Trainee(config, stock), Trainee(config, ours)]  # a Trainee rounds the weights
        exact = make(wide, stock_spec(wide))
        exact.load_state_dict(stock.state_dict())
        models = [Trainee(wide, exact), *models]
        deviations, late, batch = Deviations(), random.Random(100 + rank), draw_batch(size, rank, device)
        for _ in range(steps):
            deviations.add(*(model.step(batch, late) for model in models))
            group.workspace.check()
        deviations.check()
        group.close()


if __name__ == "__main__":  # a script and its arguments
    let_run()
    let_optimizers_run()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
