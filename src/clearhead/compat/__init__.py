"""Other people's models: what their modules do with attention, in clearhead's words; and torch's module, on ours."""

from clearhead.compat.conversion import convert
from clearhead.compat.torch import MultiheadAttention

__all__ = ["MultiheadAttention", "convert"]
