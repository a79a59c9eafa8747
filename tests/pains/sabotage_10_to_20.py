"""Protections behind rows 10 to 20, each with how to remove it and the checks that must fail without it."""

from __future__ import annotations

import sys

from clearhead import checks, functional, look, multihead, plan, ragged
from clearhead.backends import blockwise, derivatives, dropout, reference, sdpa
from clearhead.compat import cores
from clearhead.masks import convert, joined
from pains import test_09_mask_shapes as row_9
from pains import test_10_weights as row_10
from pains import test_11_every_layer as row_11
from pains import test_12_half_precision as row_12
from pains import test_13_lengths as row_13
from pains import test_14_dropout as row_14
from pains import test_15_ragged as row_15
from pains import test_16_joined_masks as row_16
from pains import test_17_widths as row_17
from pains import test_18_state_dicts as row_18
from pains import test_19_scale as row_19
from pains import test_20_second_derivatives as row_20
from pains.encoder import Way
from pains.sabotage import Removal, each, one

recording = sys.modules["clearhead.record"]  # the name in the package is the function

MODULES = ("module", "pre-norm")
BLOCKWISE, REFERENCE, SDPA = (Way(backend=name) for name in ("blockwise", "reference", "sdpa"))

REMOVALS = [
    Removal(
        "everything is one tile",
        plan,
        "tiles",
        "if torch.compiler.is_exporting():",
        "if True:",
        (
            *each(row_9.check_not_expanded),
            *each(row_10.check_memory),
            *each(row_14.check_memory, backend="blockwise"),
            *each(row_16.check_cost),
            *each(row_16.check_cost, backend="blockwise"),
        ),
    ),
    # Row 10: weights.
    Removal(
        "weights are taken after dropout",
        look,
        "_map_tile",
        'if name == "dropped_weights" else weights',
        "",
        each(row_10.check_dropped_apart),
    ),
    Removal(
        "weights are averaged over the heads",
        look,
        "_map_tile",
        "_sight(request, aside, tile).weights",
        "_sight(request, aside, tile).weights.mean(dim=1, keepdim=True)",
        each(row_10.check_weights),
    ),
    Removal(
        "all weights are made, whatever was asked",
        look,
        "look",
        "At() if at is True else at",
        "At()",
        (*each(row_10.check_only_what_was_asked), *each(row_10.check_memory)),
    ),
    Removal(
        "looking takes a slow path",
        functional,
        "attention",
        "choose(request, backend)",
        'choose(request, backend if observe is None else "reference")',
        (*each(row_10.check_weights, way=Way(observed=True, backend="sdpa")), *each(row_10.check_memory)),
    ),
    # Row 11: what can be hooked, replaced and recorded.
    Removal(
        "the output projection is not called",
        multihead.MultiHeadAttention,
        "forward",
        "self.out_proj(",
        "(lambda x: nn.functional.linear(x, self.out_proj.weight, self.out_proj.bias))(",
        each(row_11.check_hooks, MODULES),
    ),
    Removal(
        "the core is not called",
        multihead.MultiHeadAttention,
        "forward",
        "self.core(",
        "self.core.forward(",
        each(row_11.check_hooks, MODULES),
    ),
    Removal(
        "a replaced projection is passed over",
        multihead.MultiHeadAttention,
        "forward",
        "self.out_proj(",
        'getattr(self.out_proj, "base", self.out_proj)(',
        each(row_11.check_adapted, MODULES),
    ),
    Removal(
        "only the first layer is recorded",
        recording,
        "record",
        "for module in own:",
        "for module in own[:1]:",
        each(row_11.check_recorded, ("pre-norm",)),
    ),
    Removal(
        "padded queries count in what is recorded",
        cores,
        "padding_in",
        "found = same if",
        "found = None if",
        each(row_11.check_recorded, MODULES),
    ),
    Removal(
        "what is recorded knows no bias",
        cores._Instead,
        "__call__",
        "Call(self.mha, query, key, value, mask, padded=padded, **options)",
        "Call(self.mha, query, key, value, mask, padded=padded, **{**options, 'attn_bias': None})",
        each(row_11.check_recorded, MODULES, biased=True),
    ),
    # Row 12: half precision.
    Removal(
        "scores are kept in half precision",
        checks,
        "accumulating",
        "torch.float64 if dtype == torch.float64 else torch.float32",
        "dtype",
        (
            *each(row_12.check_large_scores, way=BLOCKWISE),
            *each(row_12.check_large_scores, way=REFERENCE),
            *each(row_12.check_large_scores, way=BLOCKWISE, dtype="bf16", scale=0.5),
        ),
    ),
    Removal(
        "what is hidden gets a large negative score",
        blockwise,
        "weights_of",
        "scores.masked_fill(~visible, -torch.inf)",
        "scores.masked_fill(~visible, -1e9)",
        each(row_12.check_nothing_hidden_weighs, way=Way(observed=True, backend="blockwise")),
    ),
    # Row 13: lengths.
    Removal(
        "a value of another length is let in",
        checks,
        "_check_shapes",
        "if key.shape[-2] != value.shape[-2]:",
        "if False:",
        each(row_13.check_raises, ("function",)),
    ),
    Removal(
        "the module lets in a value of another length",
        checks,
        "check_inputs",
        "if key.shape[1] != value.shape[1]:",
        "if False:",
        each(row_13.check_raises, MODULES),
    ),
    Removal(
        "a value of another batch is let in",
        checks,
        "_check_shapes",
        "not query.shape[0] == key.shape[0] == value.shape[0]",
        "False",
        each(row_13.check_raises, ("function",), length=row_13.S, rows=3),
    ),
    Removal(
        "the module lets in a value of another batch",
        checks,
        "check_inputs",
        "if not query.shape[0] == key.shape[0] == value.shape[0]:",
        "if False:",
        each(row_13.check_raises, MODULES, length=row_13.S, rows=3),
    ),
    Removal(
        "a value of another number of heads is let in",
        checks,
        "_check_shapes",
        "if value.shape[1] != Hkv:",
        "if False:",
        one(row_13.check_heads_raise),
    ),
    # Row 14: dropout.
    Removal(
        "dropout in eval",
        multihead.MultiHeadAttention,
        "forward",
        "self.dropout_p if self.training else 0.0",
        "self.dropout_p",
        (
            *each(row_14.check_none_in_eval, MODULES, way=BLOCKWISE),
            *each(row_14.check_none_in_eval, MODULES, way=REFERENCE),
        ),
    ),
    Removal(
        "no dropout without gradients",
        checks,
        "check",
        "dropout_p, None, axes",
        "dropout_p if torch.is_grad_enabled() else 0.0, None, axes",
        each(row_14.check_some_in_training),
    ),
    Removal(
        "dropout does not scale up what it keeps",
        blockwise,
        "dropped",
        "weights / (1 - request.dropout_p or 1.0)",
        "weights",
        (*each(row_14.check_some_in_training, ("function", "module")), *each(row_10.check_dropped_apart)),
    ),
    Removal(
        "all heads drop alike",
        dropout,
        "kept",
        "^ h)",
        "^ h * 0)",
        one(row_14.check_kept, way=BLOCKWISE),
    ),
    Removal(
        "a tenth more is dropped",
        dropout,
        "kept",
        "request.dropout_p * 2**32",
        "request.dropout_p * 1.1 * 2**32",
        one(row_14.check_kept, way=BLOCKWISE),
    ),
    # Row 15: ragged batches.
    Removal(
        "the side of the padding is forgotten",
        ragged,
        "pad",
        "KeyPadding(lengths, side=side)",
        "KeyPadding(lengths)",
        each(row_15.check_ragged, side="left"),
    ),
    Removal(
        "padding is guessed from the ids",
        ragged,
        "pad",
        "KeyPadding(lengths, side=side)",
        "KeyPadding.from_ids(ids, pad_id)",
        each(row_15.check_ragged),
    ),
    # Row 16: masks joined.
    Removal(
        "joined masks lose their reach",
        joined.And,
        "_reach",
        "start = max(r.start for r in reaches)",
        "return range(S)",
        (*each(row_16.check_cost), *each(row_16.check_cost, backend="blockwise")),
    ),
    Removal(
        "joined masks are nested",
        joined._Joined,
        "_of",
        "flat.extend(mask.parts if isinstance(mask, cls) else [mask])",
        "flat.append(mask)",
        one(row_16.check_structure),
    ),
    Removal(
        "the first mask of two is taken",
        convert,
        "_all_of",
        "mask = mask & part",
        "pass",
        (
            *each(row_16.check_both_hide, joined="both of torch's module"),
            *each(row_16.check_both_hide, joined="three of torch's module"),
        ),
    ),
    # Row 17: widths and axes.
    Removal(
        "the scale is that of the value's width",
        checks,
        "check",
        "E**-0.5 if E",
        "value.shape[-1] ** -0.5 if E",
        (
            *each(row_17.check_widths, MODULES, way=BLOCKWISE, widths="other value heads"),
            *one(row_17.check_function_widths, way=BLOCKWISE),
        ),
    ),
    Removal(
        "query head h uses key head h % Hkv",
        reference.Reference,
        "run",
        "repeat_interleave(request.group, dim=1)",
        "repeat(1, request.group, 1, 1)",
        one(row_17.check_function_widths, way=REFERENCE),
    ),
    Removal(
        "attention runs over the batch",
        functional,
        "attention",
        "check(query, key, value, mask,",
        "check(*(t.transpose(0, -2) for t in (query, key, value)), mask,",
        each(row_17.check_batch_first, ("function", "module")),
    ),
    Removal(
        "a message has no numbers",
        multihead.MultiHeadAttention,
        "__init__",
        ", but {embed_dim} = {embed_dim // num_heads} x ",
        " ",
        one(row_17.check_numbers_told),
    ),
    Removal(
        "a wrong width is left to torch",
        checks,
        "_check_fits",
        "if given.shape[-1] != projection.in_features:",
        "if False:",
        each(row_17.check_wrong_widths_raise, MODULES),
        RuntimeError,
    ),
    # Row 18: state dicts.
    Removal(
        "packed projections are taken in another order",
        multihead.MultiHeadAttention,
        "from_torch",
        "module.in_proj_weight.chunk(3)",
        "module.in_proj_weight.chunk(3)[::-1]",
        (
            *one(row_18.check_from_torch),
            *one(row_18.check_to_torch),
            *each(row_18.check_in_an_encoder, ("pre-norm",)),
        ),
    ),
    Removal(
        "biases stay behind",
        multihead.MultiHeadAttention,
        "from_torch",
        "copy_parameters([bias], [projection.bias])",
        "pass",
        (
            *one(row_18.check_from_torch),
            *one(row_18.check_from_torch, "split"),
            *one(row_18.check_to_torch, "split"),
            *each(row_18.check_in_an_encoder, ("pre-norm",)),
        ),
    ),
    Removal(
        "split weights are not copied back",
        multihead.MultiHeadAttention,
        "to_torch",
        "[q.weight, k.weight, v.weight], weights_in(module)",
        "[q.weight, k.weight], weights_in(module)[:2]",
        (*one(row_18.check_to_torch, "split"), *one(row_18.check_to_torch, "split keys")),
    ),
    Removal(
        "projections have other names",
        multihead.MultiHeadAttention,
        "__init__",
        "self.core = Core()",
        "self.core = Core(); self.extra = nn.Parameter(torch.zeros(1))",
        each(row_18.check_own_layout, MODULES, num_kv_heads=3),
    ),
    Removal(
        "other layouts are not read",
        multihead.MultiHeadAttention,
        "__init__",
        "self.register_load_state_dict_pre_hook(",
        "(",
        (*one(row_18.check_loads), *one(row_18.check_loads, "split")),
        RuntimeError,
    ),
    # Row 19: scale.
    Removal(
        "torch's kernel gets a scale that is not positive",
        sdpa.Sdpa,
        "reasons",
        "if request.scale < torch.finfo(torch.float32).tiny:",
        "if False:",
        (*each(row_19.check_scale), *each(row_19.check_scale, scale=0.0), *each(row_19.check_scale, way=SDPA)),
    ),
    Removal(
        "torch's kernel gets a scale that is 0 as a float32",
        sdpa.Sdpa,
        "reasons",
        "request.scale < torch.finfo(torch.float32).tiny",
        "request.scale <= 0",
        each(row_19.check_scale, scale=row_19.TINY, way=SDPA),
    ),
    Removal(
        "a scale of 0 is taken for none",
        checks,
        "check",
        "default if scale is None else",
        "default if not scale else",
        each(row_19.check_scale, scale=0.0),
    ),
    # Row 20: derivatives.
    Removal(
        "the fused backward is all there is",
        derivatives,
        "differentiable",
        "if not request.needs_grad or torch.compiler.is_compiling():",
        "if True:",
        each(row_20.check_double_backward),
        RuntimeError,
    ),
    Removal(
        "the fused backward is not computed anew",
        derivatives._Fused,
        "backward",
        "if torch.is_grad_enabled():",
        "if False:",
        each(row_20.check_double_backward),
        RuntimeError,
    ),
    Removal(
        "torch's kernels are used inside torch.func",
        sdpa.Sdpa,
        "reasons",
        "if transforming():",
        "if False:",
        (*each(row_20.check_forward_mode), *each(row_20.check_hessian)),
        RuntimeError,
    ),
]
