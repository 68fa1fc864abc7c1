"""A communicator without a network, for one rank alone."""

from __future__ import annotations

import torch

from comet.comm.base import Communicator, SymmTensor, pointer_table


class LocalCommunicator(Communicator):
    """The only rank of its group: plain memory of any device, no process group, nobody to wait for.

    Args:
        device: Where memory lives.
        timeout_s: Deadline handed to kernels, in seconds.
    """

    def __init__(self, device: torch.device, timeout_s: float = 30.0) -> None:
        super().__init__(0, 1, device, timeout_s)

    def _alloc(self, num_bytes: int) -> SymmTensor:
        try:
            peers = (torch.zeros(num_bytes, dtype=torch.uint8, device=self.device),)
        except RuntimeError as failure:
            reason = str(failure).splitlines()[0]
            needed = f"1 x {num_bytes} bytes needed, {reason}"
            raise ValueError(f"num_bytes={num_bytes} must fit {self.device}: {needed}; lower max_tokens") from failure
        return SymmTensor(peers, pointer_table(peers), self.rank)

    def _barrier(self) -> None:
        """Nothing."""

    def _renew(self) -> None:
        """Nothing."""

    def _close(self, in_step: bool) -> bool:
        return True
