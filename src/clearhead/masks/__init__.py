"""Masks: immutable values that say which keys a query may attend to. True always means *may attend*."""

from clearhead.masks.base import ALL, And, Index, Mask, Not, Or, Tile
from clearhead.masks.convert import as_mask, mask_from_mha, mask_from_sdpa
from clearhead.masks.kinds import (
    Allowed,
    Blocked,
    Causal,
    KeyPadding,
    Prefix,
    QueryPadding,
    Segments,
    Window,
)
from clearhead.masks.parse import parse_mask

__all__ = [
    "ALL",
    "Allowed",
    "And",
    "Blocked",
    "Causal",
    "Index",
    "KeyPadding",
    "Mask",
    "Not",
    "Or",
    "Prefix",
    "QueryPadding",
    "Segments",
    "Tile",
    "Window",
    "as_mask",
    "mask_from_mha",
    "mask_from_sdpa",
    "parse_mask",
]
