"""Ways to compute attention, best first, and the choice among them by declared reasons."""

from __future__ import annotations

from clearhead.backends.base import Backend
from clearhead.backends.blockwise import Blockwise
from clearhead.backends.native import Native
from clearhead.backends.reference import Reference
from clearhead.backends.sdpa import Sdpa
from clearhead.checks import Request
from clearhead.errors import BackendError

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Native(), Sdpa(), Blockwise(), Reference())}


def choose(request: Request, name: str | None) -> Backend:
    """The backend of that name, or the first that can do the request.

    Raises:
        BackendError: the one asked for can't, or none can; with every reason.
        ValueError: there is no backend of that name.
    """
    if name is not None:
        if not isinstance(name, str) or name not in BACKENDS:
            raise ValueError(f"there is no backend {name!r}: choose from {', '.join(BACKENDS)}, or None.")
        reasons = BACKENDS[name].reasons(request)
        if reasons:
            raise BackendError(f"backend {name!r} can't do this call: {'; '.join(reasons)}.")
        return BACKENDS[name]
    declined = {}
    for backend in BACKENDS.values():
        reasons = backend.reasons(request)
        if not reasons:
            return backend
        declined[backend.name] = reasons
    raise BackendError(
        "no backend can do this call. " + " ".join(f"{name}: {'; '.join(why)}." for name, why in declined.items())
    )


__all__ = ["BACKENDS", "Backend", "choose"]
