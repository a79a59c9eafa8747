"""A mask from text, such as ``Causal() & KeyPadding(lengths=[8, 5])``, without ever running the text.

The text is parsed to a syntax tree and only these nodes are followed: calls of the mask classes by name, the
operators ``& | ~``, parentheses, and literals (numbers, strings, True, False, None, lists of them).
"""

from __future__ import annotations

import ast
import warnings

from clearhead.errors import MaskError
from clearhead.masks.base import Mask
from clearhead.masks.relative import Causal, Window
from clearhead.masks.tensors import Allowed, Blocked
from clearhead.masks.tokens import KeyPadding, Prefix, QueryPadding, Segments

MAX_CHARACTERS = 10_000
MAX_DEPTH = 50
KINDS: dict[str, type[Mask]] = {
    kind.__name__: kind for kind in (Allowed, Blocked, Causal, KeyPadding, Prefix, QueryPadding, Segments, Window)
}


def parse_mask(text: str) -> Mask:
    """The mask that an expression writes out.

    Args:
        text: mask constructors with literal arguments, combined by ``& | ~`` and parentheses; at most
            10,000 characters and 50 levels deep.

    Raises:
        MaskError: anything else, with the place and what is allowed.

    Example:
        >>> parse_mask("Causal() & ~Window(left=1)")
        Causal() & ~Window(left=1)
        >>> parse_mask("__import__('os')")
        Traceback (most recent call last):
        clearhead.errors.MaskError: mask expression, column 1: '__import__' is not a mask. Masks are ...
    """
    if len(text) > MAX_CHARACTERS:
        raise MaskError(f"mask expression: {len(text):,} characters are more than the {MAX_CHARACTERS:,} allowed.")
    # Python's own parser recurses on nesting: bound it before the parser sees the text. A long chain of
    # operators nests to the left once for each of them.
    depth = max(_nesting(text), text.count("&") + text.count("|") + text.count("~"))
    if depth > MAX_DEPTH:
        raise MaskError(f"mask expression: {depth:,} levels or operators are more than the {MAX_DEPTH} allowed.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a foreign text: it is refused or not, and that's all
            tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else "not an expression"
        column = f", column {error.offset}" if isinstance(error, SyntaxError) and error.offset else ""
        raise MaskError(
            f"mask expression{column}: {reason}. Write e.g. Causal() & KeyPadding(lengths=[8, 5])."
        ) from None
    return _mask(tree.body)


def _mask(node: ast.expr) -> Mask:
    match node:
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _mask(left) & _mask(right)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _mask(left) | _mask(right)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_mask(operand)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            if name not in KINDS:
                raise _refused(node, f"{name!r} is not a mask. Masks are {', '.join(sorted(KINDS))}")
            if None in (given := [k.arg for k in keywords]):
                raise _refused(node, "** is not allowed")
            if len(set(given)) < len(given):
                raise _refused(node, f"{name}: an argument is given twice")
            named = {str(k.arg): _literal(k.value) for k in keywords}
            try:
                return KINDS[name](*map(_literal, args), **named)
            except TypeError as error:
                raise _refused(node, f"{name}: {str(error).replace('__init__() ', '').split('.')[-1]}") from None
        case ast.Name(id=name) if name in KINDS:
            raise _refused(node, f"{name} is a kind of mask: call it, as in {name}(...)")
        case ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            raise _refused(node, "combine masks with & | ~, not with and, or, not")
    raise _refused(node, "only masks, & | ~ and parentheses are allowed here")


def _literal(node: ast.expr) -> object:
    allowed = (ast.Constant, ast.List, ast.Tuple, ast.UnaryOp, ast.USub, ast.Load)
    for part in ast.walk(node):
        if not isinstance(part, allowed):
            raise _refused(node, "arguments must be numbers, strings, True, False, None or lists of them")
        if isinstance(part, ast.Constant) and isinstance(part.value, int) and part.value > 2**63:
            raise _refused(part, f"too large a number ({part.value.bit_length()} bits)")
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise _refused(node, "- goes before a number") from None


def _nesting(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _refused(node: ast.AST, reason: str) -> MaskError:
    column = getattr(node, "col_offset", 0) + 1
    return MaskError(f"mask expression, column {column}: {reason}.")
