"""The exceptions Comet raises on purpose; everything a user can cause is a ``ValueError`` or one of these."""


class CommTimeoutError(RuntimeError):
    """A rank waited for another rank longer than the communicator's deadline."""


class CapacityError(RuntimeError):
    """More routed rows arrived on a rank than the capacity the user configured, and dropping was not chosen."""


class EpochError(RuntimeError):
    """So many calls were made that signals between ranks have to be restarted: ``restart`` does that, on all ranks."""


class StepFailedError(RuntimeError):
    """A rank of the group failed in an earlier step; the message names both, and what brings the ranks back."""


class HostComputeError(RuntimeError):
    """The host's cores did not compute the experts of a step in time; what came of that step means nothing."""


class NothingMeasuredError(RuntimeError):
    """No candidate or point of a measurement ran; the message says why the first one did not."""


class UnavailableError(RuntimeError):
    """A backend or an optional package cannot work on this machine; the message says what to use instead."""


class AgreedError(ValueError):
    """All ranks of a group refuse the same call together, so no rank waits for another; the next call is right."""


class NotFiniteError(ValueError):
    """The router met NaN or infinity, or logits of new tokens are NaN: training diverged, or weights are damaged."""
