"""The exceptions that clearhead raises itself.

ValueError
 +-- ShapeError      sizes, dtypes or devices of the inputs do not fit together
 +-- MaskError       a mask is malformed, ambiguous, or does not fit the inputs
RuntimeError
 +-- BackendError    no backend (or not the one asked for) can do this call
MemoryError
 +-- TooLargeError   what is to be observed takes more memory than allowed
"""


class ShapeError(ValueError):
    """Sizes, dtypes or devices of the inputs do not fit together."""


class MaskError(ValueError):
    """A mask is malformed, ambiguous, or does not fit the inputs."""


class BackendError(RuntimeError):
    """No backend, or not the one asked for, can do this call; the message lists every reason."""


class TooLargeError(MemoryError):
    """What is to be observed takes more bytes than `Observe(allow_bytes=...)`; nothing was allocated."""
