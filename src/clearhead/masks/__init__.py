"""Masks: immutable values that say which keys a query may attend to. True always means *may attend*."""

from clearhead.masks.base import Mask
from clearhead.masks.convert import as_mask, mask_from_mha, mask_from_sdpa
from clearhead.masks.joined import And, Not, Or
from clearhead.masks.parse import parse_mask
from clearhead.masks.relative import Causal, Window
from clearhead.masks.rows import living_rows, visible_cells
from clearhead.masks.tensors import Allowed, Blocked
from clearhead.masks.tiles import ALL, Index, Tile, positions
from clearhead.masks.tokens import KeyPadding, Prefix, QueryPadding, Segments
from clearhead.masks.values import at_hand

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
    "at_hand",
    "living_rows",
    "mask_from_mha",
    "mask_from_sdpa",
    "parse_mask",
    "positions",
    "visible_cells",
]
