"""A small tokenizer and documents for tests of training on text."""

from pathlib import Path

END = "<end>"
DOCUMENTS = [f"Document {number}:\n" + "".join(f"{number} times {b} is {number * b}\n" for b in range(9 + number % 5))
             for number in range(60)]  # fmt: skip


def make_tokenizer(folder: Path, *, vocab_size: int = 300, end: str | None = END) -> Path:
    """Save a byte-level BPE tokenizer of ``DOCUMENTS`` into a folder, and return the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    options = dict(vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(DOCUMENTS, trainers.BpeTrainer(**options))
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end).save_pretrained(folder)
    return folder
