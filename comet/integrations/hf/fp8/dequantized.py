"""What transformers makes of a block FP8 folder where it dequantises, as it does without a GPU.

It takes a tensor's rows over those of its scales for the height of a block: 192 rows of two scales become blocks of 96.
And an element without a scale stays a raw value. Neither can be seen in the model, but both in the folder it came from.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from comet.config import require
from comet.integrations.hf.stored import BLOCK_FP8, INDEX_FILE, SCALES, SINGLE_FILE, StoredTensor, open_checkpoint, some

_CONFIG = "config.json"
_SCALE_NAMES = (".weight_scale_inv", ".scale", ".qscale_weight")  # instead of ".weight"


def check_dequantized(config: Any) -> None:
    """Raise ``ValueError`` if transformers dequantised the weights of a model with this configuration wrongly."""
    name = getattr(config, "name_or_path", "")
    if not name or getattr(config, "quantization_config", None) is not None:
        return  # made without a folder, or kept as it is quantised
    from transformers.utils import cached_file

    try:
        found = cached_file(name, _CONFIG, local_files_only=True, revision=getattr(config, "_commit_hash", None))
    except OSError:
        return  # the folder is gone
    if found is not None:
        _check_folder(Path(found).parent, Path(found).stat().st_mtime_ns)


@cache
def _check_folder(folder: Path, _written_ns: int) -> None:
    """Reads no tensor, and the folder once for all layers, until its ``config.json`` is written again."""
    settings = json.loads((folder / _CONFIG).read_text()).get("quantization_config") or {}
    has_tensors = (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file()
    if settings.get("quant_method") != "fp8" or not has_tensors:
        return
    with ExitStack() as files:
        tensors = open_checkpoint(folder, files)
    wrong = [name for name, tensor in tensors.items() if _is_wrong(tensor, tensors, settings.get("weight_block_size"))]
    require(
        not wrong,
        f"{some(wrong)} of {folder} must have scales, and sizes that are one block or whole blocks of "
        f"{settings.get('weight_block_size')}, to be dequantised by transformers, which gets others wrong: use "
        "comet.integrations.hf.load_pretrained(folder)",
    )


def _is_wrong(tensor: StoredTensor, tensors: dict[str, StoredTensor], block: list[int] | None) -> bool:
    if tensor.dtype != BLOCK_FP8:
        return False
    names = tensor.name + SCALES, *(tensor.name.removesuffix(".weight") + ending for ending in _SCALE_NAMES)
    scales = next((tensors[name] for name in names if name in tensors), None)
    if scales is None:
        return True
    sizes = zip(tensor.shape[-2:], scales.shape[-2:], block or (), strict=False)
    return any(count > 1 and size % side for size, count, side in sizes)
