"""Hugging Face transformers with Comet as its experts, for every family whose experts compute what Comet's do.

``register`` makes Comet an experts implementation to choose by name, ``convert`` replaces the experts of a model in
place, on one rank or a group, and ``load_pretrained`` loads a checkpoint folder with each rank's part only, also one in
block FP8.
``StaticDecoder`` extends sequences token by token from a CUDA graph.
"""

from comet.integrations.hf.adapters import share_adapters
from comet.integrations.hf.by_name import register
from comet.integrations.hf.convert import check, convert, restart, weights_changed
from comet.integrations.hf.families import moe_config
from comet.integrations.hf.loading import load_pretrained
from comet.integrations.hf.modules import CometExperts
from comet.integrations.hf.static import StaticDecoder


def __getattr__(name: str) -> str:
    advice = ": no list decides any more, hf.moe_config(folder) refuses a model by name" if name == "FAMILIES" else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")
