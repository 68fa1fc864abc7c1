"""Megatron-core models with Comet's MoE layer: Megatron's router and losses, Comet's dispatch, experts and combine.

``moe_config`` says what shape the group of ranks has to serve, ``with_comet`` puts Comet into the spec of a model, and
``from_sequential`` brings the weights of Megatron's own experts. Written for Megatron-core 0.16 to 0.19; bf16, fp16
or float32; SwiGLU, GeGLU (of tanh), ReGLU, or gpt-oss's activation, which is ``quick_gelu`` with a clamp and an offset;
biases (``add_bias_linear``); EP and expert TP, with any data, sequence or pipeline parallelism around it.
"""

from comet.integrations.megatron.layer import CometExperts, CometMoELayer, from_sequential, moe_config, with_comet
