"""Memory of the kernels: nothing but the results and a few rows; views are read where they are, however far apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import clearhead as ch
from native_checks import needs_kernels

pytestmark = needs_kernels

# Bytes that each call adds at its peak, in a process of its own: what others have freed would hide it.
CODE = """
import ctypes, gc, json, torch
import clearhead as ch
H, L, E = 2, 4096, 64
libc = ctypes.CDLL(None)
def numbers(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) * 1024
def peak(call):
    call()  # scratch that stays, and what torch loads at first
    gc.collect(), libc.malloc_trim(0)
    open("/proc/self/clear_refs", "w").write("5")
    before = numbers("VmRSS")
    call()
    return numbers("VmHWM") - before
torch.set_num_threads(1)
torch.manual_seed(0)
dense = [torch.randn(1, H, L, E) for _ in range(3)]
turned = [torch.randn(1, L, H, E).transpose(1, 2) for _ in range(3)]
query = torch.randn(16, 2, 64, E)
expanded = [torch.randn(1, 1, 2 * L, E).expand(16, 2, -1, -1) for _ in range(2)]
half = [tensor.bfloat16() for tensor in dense]
found = {"touched": peak(lambda: torch.ones(2**22)), "one tensor": dense[0].nbytes}
def forward(tensors, **options):
    return lambda: ch.attention(*tensors, backend="native", **options)
def backward(tensors, **options):
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    def call():
        out = ch.attention(*leaves, backend="native", **options)
        torch.autograd.grad(out, leaves, out.detach())
    return call
everything = ch.Observe(lse=True, entropy=True, max_weight=True, distance=True, received=True, top_k=4)
for name, call in {
    "forward": forward(dense),
    "forward turned": forward(turned),
    "forward expanded": forward([query, *expanded]),
    "forward dropout": forward(dense, dropout_p=0.1),
    "forward causal": forward(dense, mask=ch.Causal() & ch.KeyPadding([L - 7])),
    "forward bool": forward(dense, mask=torch.ones(L, L, dtype=torch.bool)),
    "forward half": forward(half),
    "statistics": forward(dense, observe=everything),
    "backward": backward(dense),
    "backward turned": backward(turned),
    "backward dropout": backward(dense, dropout_p=0.1),
    "backward bias": backward(dense, attn_bias=torch.zeros(1, H, 1, L)),
}.items():
    found[name] = peak(call)
print(json.dumps(found))
"""
MIB = 2**20


@pytest.fixture(scope="module")
def peaks() -> dict[str, int]:
    if not os.access("/proc/self/clear_refs", os.W_OK) or "libasan" in Path("/proc/self/maps").read_text():
        pytest.skip("needs Linux's record of peak memory")
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_meter_sees_what_is_there(peaks: dict[str, int]) -> None:
    assert 16 * MIB <= peaks["touched"] <= 17 * MIB


# The context is one tensor of 2 MiB; a map of one head alone would be 64 MiB.
@pytest.mark.parametrize(
    "name", ["forward", "forward turned", "forward dropout", "forward causal", "forward bool", "statistics"]
)
def test_forward(peaks: dict[str, int], name: str) -> None:
    assert 0.9 * peaks["one tensor"] <= peaks[name] <= peaks["one tensor"] + MIB


def test_expanded_keys_are_not_copied(peaks: dict[str, int]) -> None:
    assert peaks["forward expanded"] <= 2 * MIB  # the context has 0.5 MiB; keys and values would have 64 each


def test_half_precision(peaks: dict[str, int]) -> None:
    assert peaks["forward half"] <= peaks["one tensor"] / 2 + MIB


@pytest.mark.parametrize("name", ["backward", "backward turned", "backward dropout", "backward bias"])
def test_backward(peaks: dict[str, int], name: str) -> None:
    """Context, three gradients, and sums of one head in float32."""
    assert peaks[name] <= 4 * peaks["one tensor"] + 4 * MIB


# -- far apart: more elements between two rows than 32 bits count ----------------------------------------------


@pytest.fixture
def space(tmp_path: Path) -> Tensor:
    """20 GB of bfloat16 of which next to nothing is there: a file with holes."""
    path = tmp_path / "space"
    elements = 10 * 2**30
    with path.open("wb") as file:
        try:
            file.truncate(2 * elements)
        except OSError:
            pytest.skip("needs a file system that keeps files with holes")
    return torch.from_file(str(path), shared=True, size=elements, dtype=torch.bfloat16)


def far(space: Tensor, values: Tensor, strides: tuple[int, ...], start: int) -> Tensor:
    """The values at places so many elements apart."""
    view = space.as_strided(values.shape, strides, start)
    return view.copy_(values)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_rows_far_apart(space: Tensor, axis: int) -> None:
    """Three of them, 2^31 + 4096 elements from each other, in any axis, forward and backward."""
    shape = [2, 2, 2, 16]
    shape[axis] = 3
    apart = [48 * 24, 24 * 16, 16, 1]
    apart[axis] = 2**31 + 4096
    torch.manual_seed(axis)
    near = [torch.randn(shape, dtype=torch.bfloat16) for _ in range(4)]
    spread = [far(space, tensor, tuple(apart), 16384 * i) for i, tensor in enumerate(near)]
    found = []
    for tensors in (near, spread):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
        out = ch.attention(*leaves, ch.Causal(), backend="native")
        found.append([out.detach(), *torch.autograd.grad(out, leaves, tensors[3])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][1].any()


def test_a_bias_and_a_mask_far_apart(space: Tensor) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, n, 4) for n in (2, 3, 3))
    bias, visible = torch.randn(1, 2, 2, 3, dtype=torch.bfloat16), torch.rand(1, 2, 2, 3) < 0.7
    spread = far(space, bias, (0, 2**32 + 4096, 2**31 + 4096, 2**30 + 4096), 0)
    flags = far(space.view(torch.uint8), visible.byte(), (0, 2**32 + 4096, 2**31 + 4096, 2**30 + 4096), 64)
    assert flags.data_ptr() != spread.data_ptr()
    one = ch.attention(query, key, value, visible, attn_bias=bias.float(), backend="native")
    other = ch.attention(query, key, value, flags.view(torch.bool), attn_bias=spread.float(), backend="native")
    assert torch.equal(one, other)
    other = ch.attention(query, key, value, flags.view(torch.bool), attn_bias=spread, backend="native")
    assert torch.equal(one, other)
