"""Fine-tune a folder with transformers' Trainer and Comet's experts: all weights, or LoRA of the experts by PEFT.

``python docs/examples/trainer.py FOLDER OUTPUT lora 1`` trains on one device, ``torchrun --nproc-per-node 2
docs/examples/trainer.py FOLDER OUTPUT full 2`` over two ranks, each of which holds its part of the experts.
"""

import sys
from typing import Any

import peft
import torch
import transformers
from transformers.distributed.configuration_utils import DistributedConfig

from comet.integrations import hf

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def load(folder: str, ranks: int = 1, experts: str = "comet") -> Any:
    """The model of a folder; over ranks its experts are divided, and all else is on each rank."""
    hf.register()
    over_ranks = DistributedConfig(ep_size=ranks, fsdp_size=ranks, fsdp_plan={}) if ranks > 1 else None
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation=experts, distributed_config=over_ranks
    )
    if experts == "comet":
        hf.check(model)
    return model


def fine_tune(model: Any, output: str, steps: int = 4) -> list[float]:
    """Train on random tokens, save the model, and return the losses of all steps."""
    torch.manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (16, 9))
    rows = [{"input_ids": ids, "labels": ids} for ids in tokens]
    settings = transformers.TrainingArguments(
        output, max_steps=steps, logging_steps=1, per_device_train_batch_size=2, learning_rate=0.01, max_grad_norm=0,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=rows)
    trainer.train()
    model.save_pretrained(output)
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def with_lora(model: Any) -> Any:
    """The model with adapters on its experts, which alone are trained."""
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[], target_parameters=EXPERTS))


if __name__ == "__main__":
    source, target, kind, ranks, *implementation = sys.argv[1:]
    loaded = load(source, int(ranks), *implementation)
    losses = fine_tune(with_lora(loaded) if kind == "lora" else loaded, target)
    sys.stdout.write(f"losses {losses}\n")
