"""Fine-tune a folder with transformers' Trainer and Comet's experts: all weights, or LoRA of the experts by PEFT.

``python docs/examples/trainer.py FOLDER OUTPUT lora 1`` trains on one device, ``torchrun --nproc-per-node 2
docs/examples/trainer.py FOLDER OUTPUT lora 2`` over two ranks, each with half of the experts. ``full`` trains all
weights. Two more numbers are the ranks that share experts, and replicas of these: ``lora 4 2 2`` takes four ranks.
"""

import sys
from typing import Any

import peft
import torch
import transformers
from transformers.distributed.configuration_utils import DistributedConfig

from comet.integrations import hf

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def load(folder: str, ranks: int = 1, ep: int = 0, replicas: int = 1, experts: str = "comet") -> Any:
    """The model of a folder; over ranks FSDP2 divides the dense weights, and Comet's kernels exchange the tokens."""
    hf.register()
    over_ranks = None
    if ranks > 1:
        over_ranks = DistributedConfig(
            ep_size=ep or ranks, fsdp_size=ranks // replicas, dp_replicate_size=replicas, ep_implementation="comet"
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation=experts, distributed_config=over_ranks
    )
    if experts == "comet":
        hf.check(model)
    return model


def fine_tune(model: Any, output: str, ranks: int = 1, steps: int = 4) -> list[float]:
    """Train on random tokens, save the model, and return the losses of all steps."""
    torch.manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (16, 9))
    rows = [{"input_ids": ids, "labels": ids} for ids in tokens]
    settings = transformers.TrainingArguments(
        output, max_steps=steps, logging_steps=1, per_device_train_batch_size=4 // ranks, learning_rate=0.01,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=rows)
    trainer.train()
    model.save_pretrained(output)
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def with_lora(model: Any, ranks: int = 1) -> Any:
    """The model with adapters on its experts, which alone are trained."""
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[], target_parameters=EXPERTS))
    return hf.share_adapters(model) if ranks > 1 else model


if __name__ == "__main__":
    source, target, kind, *words = sys.argv[1:]
    numbers = [int(word) for word in words]
    loaded = load(source, *numbers)
    losses = fine_tune(with_lora(loaded, numbers[0]) if kind == "lora" else loaded, target, numbers[0])
    sys.stdout.write(f"losses {losses}\n")
