"""Comet's modular parts inside vLLM: adapters that subclass vLLM's abstract classes, where vLLM is importable.

    kernel = FusedMoEKernel(adapt_prepare_finalize(AllToAll(config, group)),
                            adapt_experts(GroupedContiguous(config, group), moe_config, quant_config))

For vLLM 0.25 to 0.33, whose abstract classes agree; tested inside 0.33.0 itself. vLLM has no registry for parts from
outside, so a plug-in puts them in place. Covered: contiguous and batched rows, the activations in ``ACTIVATIONS``,
biases, weights unquantised, in FP8 with a scale per 128 x 128 block or in MXFP8 (by the ``w1_scale``, ``w2_scale``,
``w1_bias`` and ``w2_bias`` of the quant_config), and activations in FP8 with a scale per 128 elements. gpt-oss is
``swigluoai``, whose w1 has gate and up rows in turn: it is read where it lies. Not covered: LoRA,
SiLU with a clamp, router weights on the input, ``prepare_async`` and with it two micro-batches in flight at once (vLLM
hands nothing from ``prepare`` to ``finalize``, so the adapter does).
"""

from comet.integrations.vllm.adapters import adapt_experts, adapt_prepare_finalize
