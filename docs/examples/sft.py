"""Fine-tune a folder on texts with TRL's SFTTrainer, and LoRA of the experts that Comet computes.

``python docs/examples/sft.py FOLDER TEXTS OUTPUT`` reads a text from each line of a file, and saves the adapters.
"""

import sys
from pathlib import Path

import datasets
import peft
import torch
import transformers
import trl

from comet.integrations import hf


def fine_tune(folder: str, texts: str, output: str, experts: str = "comet") -> list[float]:
    """Train adapters of the experts for four steps, save them, and return the losses of the steps."""
    hf.register()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation=experts)
    torch.manual_seed(0)
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(
            output, max_steps=4, logging_steps=1, per_device_train_batch_size=4, learning_rate=0.01, max_length=64,
            save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=not torch.cuda.is_available(), bf16=False,
        ),
        train_dataset=datasets.Dataset.from_dict({"text": Path(texts).read_text().splitlines()}),
        peft_config=peft.LoraConfig(
            r=4, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
        ),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(output)
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


if __name__ == "__main__":
    sys.stdout.write(f"losses {fine_tune(*sys.argv[1:])}\n")
