"""``clearhead see`` on decoders, encoder-decoder models and GGUF files: tiny ones of random weights."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from clearhead import Recording
from clearhead.cli import app
from clearhead.cli.reading import _labels, _words

transformers = pytest.importorskip("transformers", reason="needs the hf extra")
tokenizers = pytest.importorskip("tokenizers", reason="needs the hf extra")

TEXT = "the red fox met the blue fox and the red fox met the dog"
WORDS = ["<pad>", "</s>", "<unk>", *dict.fromkeys(TEXT.split()), "a", "cat", "Katze", "eine"]
SIZES: dict[str, Any] = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def see(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["see", *arguments])
    assert result.exit_code == code, result.output
    return result


def tokenizer(*, end: bool) -> Any:
    """Words at white space; with `end` as T5 has it, a </s> after each text."""
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>")
    words = tokenizers.Tokenizer(model)
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if end:
        words.post_processor = tokenizers.processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", WORDS.index("</s>"))]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def saved(model: Any, name: str = "model", *, end: bool = False) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5)
    model.eval().save_pretrained(name)
    tokenizer(end=end).save_pretrained(name)
    return model


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES, hidden_size=24, intermediate_size=10, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=97, **options,
    )  # fmt: skip
    return saved(transformers.LlamaForCausalLM(config))


def t5(layers: int = 3) -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        **SIZES, d_model=24, d_kv=4, d_ff=10, num_layers=2, num_decoder_layers=layers, num_heads=5,
        decoder_start_token_id=0,
    )  # fmt: skip
    return saved(transformers.T5ForConditionalGeneration(config), end=True)


def bart() -> Any:
    torch.manual_seed(0)
    config = transformers.BartConfig(
        **SIZES, d_model=24, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4, bos_token_id=1,
        decoder_attention_heads=4, encoder_ffn_dim=5, decoder_ffn_dim=5, max_position_embeddings=53,
        decoder_start_token_id=1, forced_eos_token_id=None,
    )  # fmt: skip
    return saved(transformers.BartForConditionalGeneration(config), end=True)


def eager(model: Any, **inputs: torch.Tensor) -> Any:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(**inputs, output_attentions=True)


def ids_of(text: str) -> torch.Tensor:
    return torch.tensor([[WORDS.index(word) for word in text.split()]])


def test_a_decoder_names_its_heads_by_what_eager_weights_say() -> None:
    model = llama()
    out = see(TEXT, "--model", "model").output
    assert "model: 3 layers x 6 heads, 14 tokens" in out
    assert "next token" not in out  # a causal head sees none
    ids = ids_of(TEXT)
    weights = torch.stack(eager(model, input_ids=ids).attentions)[:, 0].double()  # (layers, heads, L, L)
    tokens = ids[0].tolist()
    scores: dict[str, torch.Tensor] = {
        "to the first token": weights[..., 0].mean(-1),
        "previous token": weights.diagonal(-1, dim1=-2, dim2=-1).mean(-1),
    }
    for kind, shift in (("duplicate token", 0), ("induction", 1)):
        pairs = torch.tensor(
            [
                [shift <= j < i and tokens[j - shift] == tokens[i] for j in range(len(tokens))]
                for i in range(len(tokens))
            ]
        )
        rows = pairs.any(-1)
        assert rows.sum() >= 6
        scores[kind] = (weights * pairs).sum(-1)[..., rows].mean(-1)
    for kind, score in scores.items():
        layer, head = divmod(int(score.argmax()), 6)
        assert re.search(rf"│ {kind} +│ L{layer}H{head} +│ +{float(score.max()):.2f} │", out), kind
        name = {"to the first token": "Sink"}.get(kind, kind.replace(" token", "-token").capitalize())
        over = int((score > 0.3).sum())
        assert re.search(rf"^{name} heads, which look at .*: {over if over else 'none'} of 18[:;]", out, re.MULTILINE)


def test_json_is_all_that_stands_on_standard_output() -> None:
    model = llama()
    result = see(TEXT, "--model", "model", "--json", "--layer", "2,0", "--head", "5,1")
    found = json.loads(result.stdout)
    assert not list(Path().glob("*.html"))
    (part,) = found["parts"]
    assert part["layers"] == ["layers.0.self_attn", "layers.2.self_attn"]
    assert [(row["number"], row["head"]) for row in part["heads"]] == [(0, 1), (0, 5), (2, 1), (2, 5)]
    attentions = eager(model, input_ids=ids_of(TEXT)).attentions
    for row in part["heads"]:
        weights = attentions[row["number"]][0, row["head"]].double()
        assert row["entropy"] == pytest.approx(float(torch.special.entr(weights).sum(-1).mean()), abs=1e-5)
        assert row["sink"] == pytest.approx(float(weights[:, 0].mean()), abs=1e-5)
        assert row["offset.1"] == pytest.approx(float(weights.diagonal(-1).mean()), abs=1e-5)
    for kind in ("sink", "previous", "induction", "duplicate", "focused"):
        ranks = part["found"][kind]
        assert len(ranks) == 4
        assert [head["score"] for head in ranks] == sorted((h["score"] for h in ranks), reverse=kind != "focused")
    assert part["tokens"] == 14
    assert any(line.startswith("Induction heads") for line in part["in_words"])


def test_chosen_statistics_are_a_table_of_every_head() -> None:
    model = llama()
    out = see(TEXT, "--model", "model", "--stat", "entropy, sink,offset.2", "--head", "3").output
    attentions = eager(model, input_ids=ids_of(TEXT)).attentions
    for layer in range(3):
        weights = attentions[layer][0, 3].double()
        numbers = [torch.special.entr(weights).sum(-1).mean(), weights[:, 0].mean(), weights.diagonal(-2).mean()]
        pattern = " +│ +".join(f"{float(number):.3f}" for number in numbers)
        assert re.search(rf"│ L{layer}H3 +│ +{pattern} │", out)
    assert "H2" not in out
    assert not list(Path().glob("*.html"))


def test_a_report_of_chosen_layers_and_heads_calls_them_by_their_numbers() -> None:
    llama()
    see(
        TEXT,
        "--model",
        "model",
        "--layer",
        "layers.1",
        "--head",
        "4,2",
        "--out",
        "page.html",
        "--save",
        "s.safetensors",
    )
    page = Path("page.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1))  # type: ignore[union-attr]
    (layer,) = data["layers"]
    assert (layer["number"], layer["numbers"], len(layer["weights"][0])) == (1, [4, 2], 2)
    loaded = Recording.load("s.safetensors")
    assert loaded.notes["numbers"] == [1]
    assert loaded[0].weights.shape == (1, 2, 14, 14)


@pytest.mark.parametrize("make", [t5, bart])
def test_an_encoder_decoder_model_shows_encoder_decoder_and_cross_attention(make: Any) -> None:
    model = make()
    out = see(TEXT, "--model", "model", "--target", "eine Katze and the dog", "--save", "all.safetensors").output
    heads = model.config.num_attention_heads
    assert f"model, encoder: 2 layers x {heads} heads, 15 tokens" in out
    assert f"model, decoder: 3 layers x {heads} heads, 6 tokens" in out
    assert f"model, cross: 3 layers x {heads} heads, 6 tokens that look at 15" in out
    assert {path.name for path in Path().glob("*.html")} == {
        "report.html",
        "report-decoder.html",
        "report-cross.html",
    }
    start = model.config.decoder_start_token_id
    source = torch.cat([ids_of(TEXT), torch.tensor([[1]])], 1)
    target = torch.cat([torch.tensor([[start]]), ids_of("eine Katze and the dog")], 1)
    theirs = eager(model, input_ids=source, decoder_input_ids=target)
    recording = Recording.load("all.safetensors")
    groups: dict[str, list[torch.Tensor]] = {"encoder": [], "decoder": [], "cross": []}
    for name, seen in recording.items():
        kind = "cross" if seen.sizes[2] != seen.sizes[3] else "encoder" if seen.sizes[2] == 15 else "decoder"
        groups[kind].append(seen.weights)
        assert name.startswith(("encoder", "model.encoder")) == (kind == "encoder")
    expected = {
        "encoder": theirs.encoder_attentions,
        "decoder": theirs.decoder_attentions,
        "cross": theirs.cross_attentions,
    }
    for kind, eager_weights in expected.items():
        assert len(groups[kind]) == len(eager_weights)
        for one, other in zip(groups[kind], eager_weights, strict=True):
            torch.testing.assert_close(one, other, atol=5e-5, rtol=0)
    data = json.loads(
        re.search(r'id="data">(.*?)</script>', Path("report-cross.html").read_text(), re.DOTALL).group(1)
    )  # type: ignore[union-attr]
    assert data["tokens"][0][1:] == ["eine", "Katze", "and", "the", "dog"]
    assert data["keyTokens"][0] == [*TEXT.split(), "</s>"]


def test_without_a_target_the_decoder_reads_what_it_writes() -> None:
    model = t5(layers=2)
    source = torch.cat([ids_of("the red fox"), torch.tensor([[1]])], 1)
    with torch.no_grad():
        ids = model.generate(source, max_new_tokens=64, do_sample=False, num_beams=1)[0].tolist()
    ids = ids[: ids.index(1)] if 1 in ids else ids
    see("the red fox", "--model", "model", "--json", "--save", "all.safetensors")
    labels = Recording.load("all.safetensors").notes["target_tokens"][0]
    assert [label.strip() for label in labels[1:]] == [WORDS[token] for token in ids[1:]]


def test_several_texts_and_targets_are_padded_and_equal_their_single_runs() -> None:
    bart()
    texts, targets = [TEXT, "the dog"], ["eine Katze", "eine Katze and the dog"]
    options = ["--model", "model", "--json"]
    together = json.loads(see(*texts, *(f"--target={t}" for t in targets), *options).stdout)["parts"]
    alone = [
        json.loads(see(text, "--target", t, *options).stdout)["parts"] for text, t in zip(texts, targets, strict=True)
    ]
    for part in range(3):
        counts = [single[part]["heads"][0]["queries"] for single in alone]
        for at, row in enumerate(together[part]["heads"]):
            mean = sum(
                n * single[part]["heads"][at]["entropy"] for n, single in zip(counts, alone, strict=True)
            ) / sum(counts)
            assert row["entropy"] == pytest.approx(mean, abs=1e-4)


def refused(*arguments: str) -> str:
    line: str = see(*arguments, code=2).stderr
    assert line.startswith("Error: ")
    assert line.count("\n") == 1
    return line


def test_choices_that_do_not_exist_are_told_before_anything_runs() -> None:
    llama()
    for option, value, message in [
        ("--stat", "entropie", "there is no statistic 'entropie': --stat takes lse, entropy"),
        ("--stat", ",", "--stat takes names or numbers with commas"),
        ("--layer", "3", "there is no layer '3': the 3 attention layers are layers.0.self_attn"),
        ("--layer", "encoder", "there is no layer 'encoder'"),
        ("--head", "6", "there is no head 6: the layers have 6 heads, 0 to 5"),
        ("--head", "-1", "--head takes numbers from 0"),
        ("--target", "x", "has no decoder beside an encoder"),
    ]:
        assert message in refused(TEXT, "--model", "model", option, value)
    assert "has 99 tokens, and the model has positions for 97" in refused("the " * 99, "--model", "model")
    bart()
    assert "2 targets don't fit 1 texts" in refused(TEXT, "--model", "model", "--target", "a", "--target", "a")
    assert "target 1 has 61 tokens, and the model has positions for 53" in refused(
        TEXT, "--model", "model", "--target", "the " * 60
    )
    assert not list(Path().glob("*.html"))


def test_a_file_too_long_for_maps_gets_numbers_at_full_length(monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.cli import parts

    llama()
    monkeypatch.setattr(parts, "LIMIT_BYTES", 10_000)
    monkeypatch.setattr(parts, "fits", lambda *_: False)
    Path("long.txt").write_text("the red fox " * 30, encoding="utf-8")
    out = see("--file", "long.txt", "--model", "model").output
    assert "90 tokens" in out
    assert "No report: it would be too large. --layer and --head choose what fits." in out
    assert not list(Path().glob("*.html"))


def test_a_repetition_is_needed_for_induction_and_the_lack_is_said() -> None:
    llama()
    out = see("the red fox", "--model", "model").output
    assert "No token of the text occurs twice" in out
    assert "│ induction" not in out


def test_hostile_names_and_labels_are_shown_as_text() -> None:
    llama()
    shutil.copytree("model", "m\x1b[31m")
    result = see("the fox [/b]\x1b[31m\x07", "--model", "m\x1b[31m", "--json")
    assert "\x1b" not in result.stdout + result.stderr
    assert "\x07" not in see("the fox \x07\x1b[0m", "--model", "m\x1b[31m").output


def test_a_configuration_cannot_choose_code_from_elsewhere() -> None:
    llama()
    path = Path("model/config.json")
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps({**config, "_attn_implementation": "someone/kernel", "auto_map": {"AutoModel": "x.Y"}})
    )
    Path("model/x.py").write_text("raise SystemExit('ran')")
    assert "3 layers x 6 heads" in see(TEXT, "--model", "model").output


def test_labels_of_parts_of_characters_and_words_after_spaces() -> None:
    text = "The 나는 x"
    spans = [(0, 3), (3, 5), (4, 5), (4, 5), (5, 6), (6, 8)]
    assert _labels(text, list("abcdef"), spans, [0] * 6) == ["The", " 나", "나·2", "나·3", "는", " x"]
    assert _words(text, spans, [0, 0, 0, 0, 0, 0]) == [1, 2, 2, 2, 2, 3]
    assert _words(text, [(0, 0), (0, 3)], [1, 0]) == [-1, 1]


def gguf_file() -> None:
    """The llama of the other tests as a GGUF file, written by the format's own package."""
    gguf = pytest.importorskip("gguf", reason="needs the gguf extra")
    import numpy as np

    weights = {name: value.numpy() for name, value in llama().model.state_dict().items()}
    writer = gguf.GGUFWriter("tiny.gguf", "llama")
    writer.add_block_count(3)
    writer.add_context_length(97)
    writer.add_embedding_length(24)
    writer.add_feed_forward_length(10)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    letters = [chr(code) for code in range(33, 127)] + ["Ġ"]
    tokens = ["<pad>", "</s>", *letters, "Ġt", "he", "Ġthe"]
    writer.add_vocab_size(len(tokens))
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    writer.add_token_merges(["Ġ t", "h e", "Ġt he"])
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(1)
    writer.add_pad_token_id(0)
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    rng = np.random.default_rng(0)
    writer.add_tensor("token_embd.weight", rng.normal(size=(len(tokens), 24)).astype(np.float32))
    writer.add_tensor("output_norm.weight", weights["norm.weight"])
    for layer in range(3):
        for theirs, ours in names.items():
            writer.add_tensor(f"blk.{layer}.{ours}.weight", weights[f"layers.{layer}.{theirs}.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shutil.rmtree("model")


def test_a_gguf_file_is_read_where_it_lies() -> None:
    gguf_file()
    result = see("The fox saw the the dog", "--model", "tiny.gguf", "--json")
    assert "it/s" not in result.stderr
    found = json.loads(result.stdout)
    assert found["model"] == "tiny"
    assert len(found["parts"][0]["heads"]) == 18
    Path("broken.gguf").write_bytes(Path("tiny.gguf").read_bytes()[:900])
    assert "can't load a model from broken.gguf" in refused("Hi", "--model", "broken.gguf")
    Path("pickle.gguf").write_bytes(b"PK\x03\x04")
    assert "pickle.gguf is a file, and no GGUF file" in refused("Hi", "--model", "pickle.gguf")


def test_without_the_gguf_package_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.cli import loading

    Path("x.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(loading, "find_spec", lambda name: None if name == "gguf" else object())
    assert "pip install 'clearhead[gguf]'" in refused("Hi", "--model", "x.gguf")
