"""The plan's tensors are pieces of one allocation: apart, aligned, and of the shapes that were asked for."""

from __future__ import annotations

import math
import random

import torch

from comet.kernels.runtime.buffers import _places, allocate, cut

CPU = torch.device("cpu")


def test_the_example_of_places() -> None:
    assert _places(((2, 3), (4,))) == ((((2, 3), (3, 1), 0), ((4,), (1,), 64)), 128)


def test_random_shapes_lie_apart_and_aligned() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(50):
        shapes = {
            f"tensor {index}": tuple(draw.choice((0, 1, 2, 3, 7, 64, 65)) for _ in range(draw.randint(0, 4)))
            for index in range(draw.randint(1, 12))
        }
        tensors = cut(allocate(shapes, CPU), shapes)
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
        for number, tensor in enumerate(tensors.values()):
            assert tensor.is_contiguous()
            assert tensor.storage_offset() % 64 == 0
            tensor.fill_(number)
        for number, (name, tensor) in enumerate(tensors.items()):
            assert (tensor == number).all(), f"{name} shares memory with another"
            assert tensor.numel() == math.prod(shapes[name])
