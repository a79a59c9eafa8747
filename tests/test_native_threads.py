"""Threads: the same bits each time, as many as torch says, and none lost in a forked child."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

import clearhead as ch
from cases import Sizes
from clearhead.backends.native_library import library
from dense import Call
from native_checks import assert_same_bits, bits, check, everything, needs_kernels, threads

pytestmark = needs_kernels

CALLS = [
    Call(Sizes(2, 4, 2, 257, 600, 33, 17), mask="causal & keys-left"),
    Call(Sizes(1, 2, 1, 600, 257, 16, 16), "bf16", mask="window", bias="hk"),
    Call(Sizes(1, 3, 3, 600, 130, 7, 5), "f16", mask="scattered", dropout_p=0.2),
    Call(Sizes(1, 1, 1, 600, 600, 16, 16), mask="allowed-hk", bias="full", dropout_p=0.2),
]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_bits_are_reproducible(call: Call, count: int) -> None:
    with threads(count):
        check(call)
        first = bits(call)
        for _ in range(4):
            assert_same_bits(bits(call), first, f"{call}: other bits by {count} threads")
        _, seen = _seen(call)
        assert_same_bits(_seen(call)[1], seen, f"{call}: other statistics by {count} threads")
        output = first[0]
    assert_same_bits(bits(call)[:1], [output], f"{call}: the output's bits depend on the threads")


def _seen(call: Call) -> tuple[Tensor, list[Tensor]]:
    query, key, value, bias = call.tensors()
    torch.manual_seed(0)
    out, seen = ch.attention(query, key, value, attn_bias=bias, **call.options(), observe=everything(call))
    return out, torch.utils._pytree.tree_leaves(dict(seen))


def test_several_python_threads_at_once() -> None:
    calls = CALLS * 3
    with threads(2):
        expected = [_seen(call)[0] for call in CALLS] * 3  # (without grad: seeds are torch's, one at a time)
    without_dropout = [i for i, call in enumerate(calls) if not call.dropout_p]

    def one(i: int) -> Tensor:
        torch.set_num_threads(2)
        return _seen(calls[i])[0]

    with threads(2), ThreadPoolExecutor(4) as pool:
        found = dict(zip(without_dropout, pool.map(one, without_dropout), strict=True))
        gradients = list(pool.map(bits, [CALLS[0]] * 6))
    for i, out in found.items():
        assert_same_bits([out], [expected[i]], str(calls[i]))
    with threads(2):
        alone = bits(CALLS[0])
    for some in gradients:
        assert_same_bits(some, alone, "gradients")


# -- in processes of their own ---------------------------------------------------------------------------------

# Small enough that torch itself, whose threads do hang in a forked child, stays alone with 2^15 numbers.
COMMON = """
import os, sys, torch
import clearhead as ch
def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 4, 200, 32, generator=generator) for _ in range(3)]
def bits():
    leaves = [tensor.requires_grad_() for tensor in inputs()]
    out = ch.attention(*leaves, ch.Causal(), backend="native")
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]
def same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
"""


def python(code: str, timeout: float = 120) -> str:
    """Output of a fresh process, which must not hang."""
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS",)}
    command = [sys.executable, "-c", COMMON + code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_as_many_threads_as_torch_says() -> None:
    module = library()
    if not Path("/proc/self/task").exists() or module is None or not module.openmp():
        pytest.skip("needs Linux's list of threads, and kernels with threads")
    code = """
torch.set_num_threads(1)
q, k, v = inputs()
ch.attention(q, k, v, backend="native")
before = len(os.listdir("/proc/self/task"))
torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
assert len(os.listdir("/proc/self/task")) == before
ch.attention(q, k, v, backend="native")
three = len(os.listdir("/proc/self/task")) - before
torch.set_num_threads(1)
team = set(os.listdir("/proc/self/task"))
def busy():
    return {task: open(f"/proc/self/task/{task}/stat").read().rsplit(")", 1)[1].split()[11] for task in team}
start = busy()
for _ in range(400):
    ch.attention(q, k, v, backend="native")
print(three, sum(start[task] != now for task, now in busy().items()))
"""
    more, busy = map(int, python(code).split())
    assert more == 2  # a team of 3
    assert busy == 1  # back at 1, no other works (or spins)


def test_a_forked_child_does_not_hang() -> None:
    """After its parent used threads: by os.fork and by multiprocessing; the same bits come out."""
    code = """
import multiprocessing, warnings
warnings.simplefilter("ignore")  # newer Pythons warn of a fork beside threads
torch.set_num_threads(2)
expected = bits()
child = os.fork()
if not child:
    os._exit(0 if same(bits(), expected) else 3)
assert os.waitpid(child, 0)[1] == 0
def work():
    sys.exit(0 if same(bits(), expected) else 3)
process = multiprocessing.get_context("fork").Process(target=work)
process.start()
process.join(60)
assert process.exitcode == 0, process.exitcode
print(same(bits(), expected))
"""
    assert python(code) == "True"


def test_workers_of_a_data_loader_do_not_hang() -> None:
    code = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, i):
        return torch.stack([tensor.sum() for tensor in bits()])
import warnings
warnings.simplefilter("ignore")
torch.set_num_threads(2)
expected = torch.stack([tensor.sum() for tensor in bits()])
loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2, timeout=60, multiprocessing_context="fork")
batches = torch.cat(list(loader))
print(torch.allclose(batches, expected.expand(6, -1), rtol=1e-4, atol=1e-3))
"""
    assert python(code) == "True"
