"""Multi-head attention you can see through, at full speed."""

from importlib.metadata import version as _version

from clearhead.compat import convert
from clearhead.compat.attach import attach, detach
from clearhead.errors import BackendError, MaskError, ShapeError, TooLargeError
from clearhead.functional import attention
from clearhead.intervene import Knockout, Patch, ScaleHeads, intervene
from clearhead.masks import (
    Allowed,
    Blocked,
    Causal,
    KeyPadding,
    Mask,
    Prefix,
    QueryPadding,
    Segments,
    Window,
    mask_from_mha,
    mask_from_sdpa,
)
from clearhead.multihead import MultiHeadAttention
from clearhead.observe import At, Observe, Seen
from clearhead.patterns import patterns
from clearhead.ragged import Batch, pad
from clearhead.record import record
from clearhead.recording import Recording

__version__ = _version("clearhead")

__all__ = [
    "Allowed",
    "At",
    "BackendError",
    "Batch",
    "Blocked",
    "Causal",
    "KeyPadding",
    "Knockout",
    "Mask",
    "MaskError",
    "MultiHeadAttention",
    "Observe",
    "Patch",
    "Prefix",
    "QueryPadding",
    "Recording",
    "ScaleHeads",
    "Seen",
    "Segments",
    "ShapeError",
    "TooLargeError",
    "Window",
    "attach",
    "attention",
    "convert",
    "detach",
    "intervene",
    "mask_from_mha",
    "mask_from_sdpa",
    "pad",
    "patterns",
    "record",
]
