"""The exceptions that clearhead raises itself.

ValueError
 +-- ShapeError      sizes, dtypes or devices of the inputs do not fit together
 +-- MaskError       a mask is malformed, ambiguous, or does not fit the inputs
RuntimeError
 +-- BackendError    no backend (or not the one asked for) can do this call
"""


class ShapeError(ValueError):
    """Sizes, dtypes or devices of the inputs do not fit together."""


class MaskError(ValueError):
    """A mask is malformed, ambiguous, or does not fit the inputs."""


class BackendError(RuntimeError):
    """No backend, or not the one asked for, can do this call; the message lists every reason."""
