"""Protections behind rows 1 to 9, each with how to remove it and the checks that must fail without it."""

from __future__ import annotations

from clearhead import checks, multihead
from clearhead.backends import blockwise, nonfinite, reference, sdpa
from clearhead.masks import convert, joined, relative, tokens
from clearhead.masks import tensors as mask_tensors
from pains import test_01_dead_rows as row_1
from pains import test_02_left_padding as row_2
from pains import test_03_hidden_nan as row_3
from pains import test_04_padding as row_4
from pains import test_05_causal as row_5
from pains import test_06_alignment as row_6
from pains import test_07_bias as row_7
from pains import test_08_polarity as row_8
from pains import test_09_mask_shapes as row_9
from pains import test_15_ragged as row_15
from pains import test_16_joined_masks as row_16
from pains.encoder import Way
from pains.sabotage import Removal, each, one

MODULES = ("module", "pre-norm")
BLOCKWISE, REFERENCE, SDPA = (Way(backend=name) for name in ("blockwise", "reference", "sdpa"))

REMOVALS = [
    # Rows 1 and 2: rows without a key.
    Removal(
        "plain torch leaves dead rows to the softmax",
        blockwise,
        "weights_of",
        ".masked_fill(~visible, 0.0), scores",
        ", scores",
        (
            *each(row_1.check_dead_rows, way=BLOCKWISE),
            *each(row_1.check_dead_gradient, way=Way(grad=True, backend="blockwise")),
            *each(row_2.check_left_padded, way=BLOCKWISE),
        ),
    ),
    Removal(
        "the reference leaves dead rows to the softmax",
        reference.Reference,
        "run",
        "torch.softmax(scores.masked_fill(~alive, 0.0), dim=-1)[..., :S].masked_fill(~visible, 0.0)",
        "torch.softmax(scores, dim=-1)[..., :S]",
        (
            *each(row_1.check_dead_rows, way=REFERENCE),
            *each(row_2.check_left_padded, way=REFERENCE),
            *each(row_15.check_ragged, way=REFERENCE),
        ),
    ),
    Removal(
        "left padding is taken for right padding",
        tokens._Padding,
        "_within",
        "position >= size - lengths",
        "position < lengths",
        (
            *each(row_2.check_left_padded),
            *each(row_4.check_as_alone, side="left"),
            *each(row_15.check_ragged, side="left"),
        ),
    ),
    # Row 3: numbers that are none.
    Removal(
        "non-finite rows are not set aside",
        nonfinite,
        "set_aside",
        "if _surely_within(limits, request):",
        "if True:",
        (
            *each(row_3.check_hidden),
            *each(row_3.check_hidden_in_self_attention),
            *each(row_3.check_hidden_gradient),
        ),
    ),
    Removal(
        "a visible NaN is turned into zeros",
        nonfinite.SetAside,
        "restore",
        "torch.where(bad, torch.nan, 1.0)",
        "0.0",
        (*each(row_3.check_visible), *each(row_3.check_visible, where="value")),
    ),
    Removal(
        "NaN in a value hides the whole item",
        nonfinite.SetAside,
        "sees",
        "(pairs & visible).any(dim=-1)",
        "pairs.any(dim=-1)",
        (*each(row_3.check_hidden, where="value"), *each(row_3.check_hidden, where="key")),
    ),
    Removal(
        "rows of padding are projected as they are",
        nonfinite,
        "by_rows",
        "projection(tensor) if id(tensor) in finite else _guarded(projection, tensor)",
        "projection(tensor)",
        each(row_3.check_hidden_parameters, MODULES),
    ),
    Removal(
        "large hidden rows are left to torch's kernel",
        nonfinite,
        "_rows_within",
        "_limit(largest, tensor)",
        "torch.finfo(tensor.dtype).max",
        (
            *one(row_3.check_large_hidden, poison="largest", masked="bias"),
            *one(row_3.check_large_hidden, poison="largest", masked="queries"),
            *one(row_3.check_large_hidden, poison="largest", masked="segments"),
        ),
    ),
    Removal(
        "a query that is NaN itself goes unnoticed",
        nonfinite.SetAside,
        "sees",
        "(own & visible.any(dim=-1)) | ",
        "",
        each(row_3.check_visible, ("function", "module"), where="query"),
    ),
    Removal(
        "a NaN stops the gradient of the query that sees it",
        nonfinite.SetAside,
        "restore",
        "own * torch.where(bad, torch.nan, 1.0)",
        "torch.where(bad, torch.nan, 1.0)",
        (*one(row_3.check_visible_gradient), *one(row_3.check_visible_gradient, where="query")),
    ),
    # Row 4: padding.
    Removal(
        "padding is not hidden",
        tokens.KeyPadding,
        "_rule",
        "self._is_real(b, k, S)",
        "self._is_real(b, k, S) | True",
        (
            *each(row_4.check_as_alone),
            *each(row_4.check_batch_mates),
            *each(row_4.check_lengths_of_their_own),
            *each(row_15.check_ragged),
            *each(row_16.check_both_hide),
        ),
    ),
    Removal(
        "padded queries attend",
        tokens.QueryPadding,
        "_rule",
        "self._is_real(b, q, L)",
        "self._is_real(b, q, L) | True",
        (*each(row_4.check_padded_queries), *each(row_4.check_lengths_of_their_own)),
    ),
    Removal(
        "the lengths of the first item serve for all",
        tokens._Padding,
        "_is_real",
        "self.lengths[broadcast(b, self.lengths)]",
        "self.lengths[broadcast(b, self.lengths) * 0]",
        (*each(row_4.check_as_alone), *each(row_4.check_batch_mates), *each(row_15.check_ragged)),
    ),
    # Rows 5 and 6: causal.
    Removal(
        "in eval the module takes its mask for a hint unless someone looks",
        multihead.MultiHeadAttention,
        "forward",
        '"mask": mask,',
        '"mask": mask if self.training or observe is not None else None,',
        (
            *each(row_5.check_causal, MODULES),
            *each(row_5.check_future_is_out_of_reach, MODULES),
            *each(row_2.check_left_padded, MODULES),
            *each(row_4.check_cut_in_chunks, MODULES, sizes=(3, 4)),
        ),
    ),
    Removal(
        "causal sees one key ahead",
        relative.Causal,
        "_rule",
        "k <= q + ",
        "k <= 1 + q + ",
        (
            *each(row_5.check_causal, way=BLOCKWISE),
            *each(row_5.check_future_is_out_of_reach, way=REFERENCE),
            *each(row_6.check_last_with_last),
        ),
    ),
    Removal(
        "torch's kernel is not told of causal",
        sdpa,
        "_run",
        "is_causal=True",
        "is_causal=False",
        (*each(row_5.check_causal), *each(row_5.check_future_is_out_of_reach)),
    ),
    Removal(
        "causal is dropped when joined with padding",
        joined.And,
        "_of",
        "flat: list[Mask] = []",
        "flat = []; masks = [m for m in masks if type(m).__name__ != 'Causal']",
        (*each(row_5.check_causal, joined="with padding"), *each(row_16.check_both_hide)),
    ),
    Removal(
        "is_causal of torch's module stays a hint",
        convert,
        "mask_from_mha",
        "if is_causal else []",
        "if is_causal and attn_mask is not None else []",
        each(row_5.check_causal, joined="from torch's module"),
    ),
    Removal(
        "the first query is aligned with the first key",
        relative,
        "_shift",
        'if align == "end"',
        'if align == "neither"',
        (*each(row_6.check_last_with_last), *each(row_6.check_chunks), *each(row_4.check_cut_in_chunks)),
    ),
    Removal(
        "align='start' is not heard",
        relative,
        "_shift",
        'if align == "end" else 0',
        "",
        each(row_6.check_first_with_first),
    ),
    Removal(
        "torch's kernel gets is_causal where L is not S",
        sdpa,
        "_run",
        " and _equal(L, S)",
        "",
        each(row_6.check_last_with_last, way=SDPA),
    ),
    # Row 7: a bias.
    Removal(
        "a bias that is not 0 hides",
        checks,
        "_check_bias",
        "    return _held(full, accumulating(query.dtype))\n",
        "    return torch.where(full == 0, 0.0, -torch.inf).to(full.dtype)\n",
        (*each(row_7.check_bias), *each(row_7.check_bias, bias="for each item", masked=False)),
    ),
    Removal(
        "a bias is dropped in eval",
        multihead.MultiHeadAttention,
        "forward",
        '"attn_bias": attn_bias,',
        '"attn_bias": attn_bias if self.training else None,',
        (*each(row_7.check_bias, MODULES), *each(row_7.check_bias, MODULES, bias="for each key")),
    ),
    Removal(
        "a bias of its own for each head is read from the first",
        blockwise,
        "bias_tile",
        "if bias is None:",
        "bias = None if bias is None else bias[:, :1]\n    if bias is None:",
        (*each(row_7.check_bias, way=BLOCKWISE), *each(row_7.check_bias_gradient, way=BLOCKWISE)),
    ),
    # Rows 8 and 9: what a mask tensor means.
    Removal(
        "True hides",
        mask_tensors.Allowed,
        "_read",
        "return visible",
        "return ~visible",
        (
            *each(row_8.check_said),
            *each(row_8.check_said, said="Allowed"),
            *each(row_8.check_said, said="torch's function"),
            *each(row_9.check_named),
        ),
    ),
    Removal(
        "Blocked shows what it should hide",
        mask_tensors.Blocked,
        "_read",
        "~visible",
        "visible",
        (
            *each(row_8.check_said, said="Blocked"),
            *each(row_16.check_both_hide, joined="both of torch's module"),
        ),
    ),
    Removal(
        "the padding of torch's module is taken for its real tokens",
        convert,
        "mask_from_mha",
        "real=~key_padding_mask",
        "real=key_padding_mask",
        each(row_8.check_said, said="torch's module, padding"),
    ),
    Removal(
        "numbers are taken for flags",
        convert,
        "_from_tensor",
        "if mask.dtype != torch.bool:",
        "mask = mask.bool()\n    if mask.dtype != torch.bool:",
        each(row_8.check_numbers_raise),
    ),
    Removal(
        "a mask is taken for the memory",
        checks,
        "check_inputs",
        "if isinstance(tensor, Mask) or (isinstance(tensor, Tensor) and tensor.dtype == torch.bool):",
        "if False:",
        each(row_8.check_mask_in_keys_place, MODULES),
    ),
    Removal(
        "a bare mask of three axes is read per head",
        convert,
        "_from_tensor",
        "    if mask.ndim == 4:",
        "    if mask.ndim == 3:\n        return Allowed(mask, axes='hqk')\n    if mask.ndim == 4:",
        each(row_9.check_three_axes_raise),
    ),
    Removal(
        "a mask of two readings is taken for one",
        convert,
        "_from_tensor",
        "if B == L != 1:",
        "if False:",
        each(row_9.check_two_readings_raise),
    ),
    Removal(
        "the items of a head stand together: repeat for repeat_interleave",
        convert,
        "mask_from_mha",
        "attn_mask.unflatten(0, (-1, num_heads))",
        "attn_mask.unflatten(0, (num_heads, -1)).transpose(0, 1)",
        each(row_9.check_torchs_three_axes),
    ),
    Removal(
        "axes are taken in the order they come",
        mask_tensors.Allowed,
        "_four_axes",
        "order = [self.letters.index(letter) for letter in AXIS_NAMES if letter in self.letters]",
        "order = list(range(len(self.letters)))",
        each(row_9.check_named, axes="hbqk"),
    ),
    Removal(
        "a mask is expanded over the heads",
        checks,
        "check",
        "    mask = as_mask(mask, B, H, L, S)",
        "    mask = as_mask(mask, B, H, L, S)\n    mask = type(mask)(mask.dense(L, S).repeat(1, H, 1, 1), 'bhqk')",
        (*each(row_9.check_not_expanded, backend="sdpa"), *each(row_9.check_not_expanded, backend="blockwise")),
    ),
]
