"""The HTML report, read back by other means than its own: Python for the payload, a browser for the page."""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from clearhead.view.report import LIMIT_BYTES, Panel, fits, render

HOSTILE = [
    "</script>",
    "<img src=x onerror=alert(1)>",
    "a\u2028b\u2029c",
    "\x1b[31mred",
    "<!--<script>",
    "'\"&amp;\\",
    "\u202etxt.exe",
    "\ud800",
    "{{data}}",
    "   ",
    "나는",
]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)


def causal_weights(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights (B, H, L, S) whose hidden part is NaN, and the mask (1, 1, L, S) that hides it."""
    generator = torch.Generator().manual_seed(seed)
    visible = torch.ones(shape[-2:], dtype=torch.bool).tril()[None, None]
    scores = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return weights.masked_fill(~visible, torch.nan), visible


def labels(batch: int, length: int, prefix: str = "t") -> list[list[str]]:
    return [[f"{prefix}{b}.{i}" for i in range(length)] for b in range(batch)]


def pooled_panel(**changes: Any) -> Panel:
    """A pooled panel of causal weights, pooled by a double loop over cells."""
    length, cells, heads = 23, 5, 2
    weights, visible = causal_weights(1, heads, length, length)
    weights = weights.nan_to_num()
    spans = [slice(i * length // cells, -((i + 1) * -length // cells)) for i in range(cells)]
    mean, maximum = torch.zeros(1, heads, cells, cells), torch.zeros(1, heads, cells, cells)
    seen = torch.zeros(1, 1, cells, cells, dtype=torch.bool)
    for i in range(cells):
        for j in range(cells):
            mean[..., i, j] = weights[..., spans[i], spans[j]].mean((-1, -2))
            maximum[..., i, j] = weights[..., spans[i], spans[j]].amax((-1, -2))
            seen[..., i, j] = visible[..., spans[i], spans[j]].any()
    strongest, keys = weights.topk(3)
    keys = torch.where(visible.expand_as(weights).gather(-1, keys), keys, -1).int()
    fields = {"mean": mean, "maximum": maximum, "top": (strongest, keys), "visible": seen, **changes}
    return Panel("pooled", **fields)


def payload(page: str) -> Any:
    return json.loads(part(page, r'<script type="application/json" id="data">(.*?)</script>'))


def part(page: str, pattern: str) -> str:
    found = re.findall(pattern, page, re.DOTALL)
    assert len(found) == 1, f"{pattern} occurs {len(found)} times"
    return str(found[0])


def numbers(block: str, dtype: str, *shape: int) -> Any:
    return np.frombuffer(base64.b64decode(block), dtype).reshape(shape)


def sha256(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


# --- exact weights ---------------------------------------------------------------------------------------


def test_every_weight_comes_back_within_half_a_step():
    weights, visible = causal_weights(2, 3, 7, 7)
    layer = payload(render([Panel("a", visible, weights)], labels(2, 7), title="t"))["layers"][0]
    for b in range(2):
        for h in range(3):
            codes = numbers(layer["weights"][b][h], "<u2", 7, 7).astype(float)
            truth = weights[b, h].numpy()
            seen = visible[0, 0].numpy()
            assert (codes[~seen] == 0).all()
            assert (codes[seen] > 0).all()
            assert np.abs((codes[seen] - 1) / 65534 - truth[seen]).max() <= 0.5001 / 65534


def test_a_visible_zero_is_not_a_hidden_one():
    weights = torch.tensor([[0.0, 1.0, 0.0]])[None, None]
    visible = torch.tensor([[True, True, False]])[None, None]
    page = render([Panel("a", visible, weights)], [["q"]], key_tokens=[["x", "y", "z"]], title="t")
    block = payload(page)["layers"][0]["weights"][0][0]
    assert numbers(block, "<u2", 3).tolist() == [1, 65535, 0]


def test_masks_that_differ_by_sequence_and_head_and_padding_rows():
    weights = torch.full((2, 2, 4, 4), 0.25)
    visible = torch.rand(2, 2, 4, 4, generator=torch.Generator().manual_seed(1)) > 0.5
    visible[0, :, 3] = False
    layer = payload(render([Panel("a", visible, weights)], labels(2, 4), title="t"))["layers"][0]
    for b in range(2):
        for h in range(2):
            codes = numbers(layer["weights"][b][h], "<u2", 4, 4)
            assert ((codes > 0) == visible[b, h].numpy()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_float_dtype_and_gradients_are_taken(dtype):
    weights = torch.full((1, 1, 2, 2), 0.5, dtype=dtype, requires_grad=True)
    page = render([Panel("a", torch.ones(1, 1, 2, 2, dtype=torch.bool), weights)], labels(1, 2), title="t")
    assert (numbers(payload(page)["layers"][0]["weights"][0][0], "<u2", 4) == 1 + 32767).all()


def test_layers_may_have_different_numbers_of_heads_and_entropy():
    one, visible = causal_weights(1, 2, 5, 5)
    two, _ = causal_weights(1, 3, 5, 5)
    dead = visible.clone()
    dead[..., 4, :] = False
    entropy = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 0.0]] * 3])
    panels = [Panel("a", visible, one), Panel("b", dead, two, entropy=entropy)]
    layers = payload(render(panels, labels(1, 5), title="t"))["layers"]
    assert [layer["heads"] for layer in layers] == [2, 3]
    assert "entropy" not in layers[0]
    assert numbers(layers[1]["entropy"][0][2], "<f4", 5).tolist() == [1, 2, 3, 4, 0]
    assert layers[1]["meanEntropy"] == [[2.5, 2.5, 2.5]]  # the dead row counts in no mean


# --- pooled maps -----------------------------------------------------------------------------------------


def half(codes: Any) -> Any:
    return (codes - 1).astype(np.uint16).view(np.float16).astype(float) / 2**15


def test_pooled_maps_keep_relative_precision_and_top_keys_are_exact():
    panel = pooled_panel()
    data = payload(render([panel], labels(1, 23), title="t"))
    layer = data["layers"][0]
    assert (data["mode"], data["cells"], data["top"]) == ("pooled", 5, 3)
    assert panel.mean is not None
    assert panel.maximum is not None
    assert panel.top is not None
    seen = panel.visible[0, 0].numpy()
    for h in range(2):
        for name, truth in (("mean", panel.mean), ("maximum", panel.maximum)):
            codes = numbers(layer[name][0][h], "<u2", 5, 5)
            assert ((codes > 0) == seen).all()
            np.testing.assert_allclose(half(codes)[seen], truth[0, h].numpy()[seen], rtol=2**-11)
        keys = numbers(layer["topKeys"][0][h], "<u2", 23, 3).astype(int) - 1
        assert (keys == panel.top[1][0, h].numpy()).all()
        codes = numbers(layer["topWeights"][0][h], "<u2", 23, 3).astype(float)
        truth = panel.top[0][0, h].numpy()
        assert np.abs((codes - 1) / 65534 - truth)[keys >= 0].max() <= 0.5001 / 65534
        assert (codes[keys < 0] == 0).all()


@pytest.mark.parametrize("mean", [1.0, 1 / 256, 1e-5, 1e-8])
def test_tiny_means_are_not_lost(mean):
    maps = torch.full((1, 2, 5, 5), mean, dtype=torch.float64)
    page = render([pooled_panel(mean=maps)], labels(1, 23), title="t")
    codes = numbers(payload(page)["layers"][0]["mean"][0][0], "<u2", 25)
    np.testing.assert_allclose(half(codes[codes > 0]), mean, rtol=1e-3)


def test_the_page_says_what_was_pooled():
    line = payload(render([pooled_panel()], labels(1, 23), title="t"))["line"]
    for words in (
        "Pooled",
        "23 queries × 23 keys",
        "4.6 queries",
        "5 × 5 cells",
        "3 strongest keys are exact",
    ):
        assert words in line
    weights, visible = causal_weights(1, 1, 3, 3)
    assert payload(render([Panel("a", visible, weights)], labels(1, 3), title="t"))["line"].startswith("Exact")


def test_key_indices_beyond_16_bits():
    length = 65536
    top = (torch.ones(1, 1, 1, 1), torch.tensor([[[[length - 1]]]]))
    panel = Panel("a", torch.ones(1, 1, 1, 1, dtype=torch.bool), mean=torch.ones(1, 1, 1, 1), top=top,
                  maximum=torch.ones(1, 1, 1, 1))  # fmt: skip
    data = payload(render([panel], [["q"]], key_tokens=[["k"] * length], title="t"))
    assert data["wide"]
    assert numbers(data["layers"][0]["topKeys"][0][0], "<u4", 1).tolist() == [length]


def test_fits_at_its_edge():
    assert LIMIT_BYTES == 8 * 2**20
    assert fits(1, 1, 1, 2048, 2048)
    assert fits(2, 2, 4, 512, 512)
    assert not fits(1, 1, 1, 2048, 2049)
    assert not fits(2, 2, 4, 513, 512)


# --- what is not trusted ---------------------------------------------------------------------------------


def hostile_page() -> str:
    n = len(HOSTILE)
    weights, visible = causal_weights(1, 1, n, n)
    panel = Panel("layer</script><b>", visible, weights)
    return render([panel], [HOSTILE], title="<i>T</i> & \x1b]0;\u2028" + HOSTILE[1], notes=HOSTILE)


def test_hostile_text_never_occurs_raw():
    page = hostile_page()
    for text in (
        "<img",
        "onerror=alert(1)>",
        "\u2028",
        "\u2029",
        "\x1b",
        "\u202e",
        "\ud800",
        "<i>",
        "<b>",
        "<!--<",
    ):
        assert text not in page
    assert page.count("</script>") == 2
    page.encode("utf-8")
    body = page.split('id="data">')[1].split("</script>")[0]
    assert not set("<>&\u2028\u2029") & set(body)


def test_labels_show_what_cannot_be_seen():
    shown = payload(hostile_page())["tokens"][0]
    assert shown[:2] == HOSTILE[:2]
    assert shown[2] == "a⟨U+2028⟩b⟨U+2029⟩c"
    assert shown[3] == "␛[31mred"
    assert shown[6] == "⟨U+202E⟩txt.exe"
    assert shown[7] == "⟨U+D800⟩"
    assert shown[8] == "{{data}}"
    assert shown[9] == "␠␠␠"
    assert shown[10] == "나는"


def test_the_policy_allows_the_inlined_parts_by_their_hash_and_nothing_else():
    page = hostile_page()
    policy = html.unescape(part(page, r'http-equiv="Content-Security-Policy" content="([^"]*)"'))
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules == {
        "default-src": "'none'",
        "script-src": sha256(part(page, r"<script>(.*?)</script>")),
        "style-src": sha256(part(page, r"<style>(.*?)</style>")),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert page.index("Content-Security-Policy") < page.index("<style>") < page.index("<script")


def test_the_page_reaches_for_nothing_and_never_parses_text():
    page = render([pooled_panel()], labels(1, 23), title="t")
    for text in ("http://", "https://", "//cdn", "@import", "url(", "src=", " style=", "onclick"):
        assert text not in page
    script = part(page, r"<script>(.*?)</script>")
    for text in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "fetch(",
    ):
        assert text not in script


def test_the_same_arguments_give_the_same_page():
    assert hostile_page() == hostile_page()


# --- errors ----------------------------------------------------------------------------------------------


def exact(**changes: Any) -> Panel:
    weights, visible = causal_weights(2, 3, 5, 5)
    return Panel(**{"name": "a", "visible": visible, "weights": weights, **changes})


@pytest.mark.parametrize(
    ("panels", "tokens", "message"),
    [
        ([], labels(2, 5), "at least one panel"),
        ([exact()], labels(1, 5), "a list of labels for each of the 2 sequences, not for 1: tokens="),
        ([exact()], labels(2, 6), r"tokens\[0\] has 6 labels for 5 positions"),
        ([exact()], ["abcde", "abcde"], r"tokens\[0\] must be a list"),
        ([exact(weights=None)], labels(2, 5), "no weights, so it needs mean and maximum and top"),
        ([exact(mean=torch.zeros(2, 3, 2, 2))], labels(2, 5), "has weights and pooled maps"),
        ([exact(weights=torch.zeros(2, 3, 5))], labels(2, 5), r"\(2, 3, 5\)"),
        ([exact(visible=torch.ones(1, 1, 5, 4, dtype=torch.bool))], labels(2, 5), r"\(2\|1, 3\|1, 5, 5\)"),
        ([exact(visible=torch.ones(1, 1, 5, 5))], labels(2, 5), "torch.float32"),
        ([exact(visible=torch.ones(1, 2, 5, 5, dtype=torch.bool))], labels(2, 5), "does not fit"),
        ([exact(entropy=torch.zeros(2, 3, 4))], labels(2, 5), r"entropy must be \(2, 3, 5\)"),
        ([exact(weights=torch.full((2, 3, 5, 5), 1.5))], labels(2, 5), "in 0..1, got 1.5"),
        ([exact(weights=torch.full((2, 3, 5, 5), torch.nan))], labels(2, 5), "in 0..1, got nan"),
        ([exact(), pooled_panel()], labels(2, 5), "all exact or all pooled"),
        ([exact(), Panel("b", *causal_weights(2, 3, 4, 4)[::-1])], labels(2, 5), r"\(2, 4, 4\)"),
        ([pooled_panel(maximum=torch.zeros(1, 2, 5, 4))], labels(1, 23), "maximum must be"),
        ([pooled_panel(top=(torch.zeros(1, 2, 23, 1), torch.full((1, 2, 23, 1), 23)))], labels(1, 23), "22"),
    ],
)  # fmt: skip
def test_errors_name_the_numbers(panels, tokens, message):
    with pytest.raises(ValueError, match=message):
        render(panels, tokens, title="t")


def test_cross_attention_needs_labels_of_its_keys():
    panel = Panel("a", torch.ones(1, 1, 2, 3, dtype=torch.bool), torch.full((1, 1, 2, 3), 1 / 3))
    with pytest.raises(ValueError, match="key_tokens"):
        render([panel], labels(1, 2), title="t")
    with pytest.raises(ValueError, match=r"key_tokens\[0\] has 4 labels for 3"):
        render([panel], labels(1, 2), key_tokens=labels(1, 4), title="t")
    assert payload(render([panel], labels(1, 2), key_tokens=labels(1, 3, "k"), title="t"))["keyTokens"]


# --- in a browser ----------------------------------------------------------------------------------------


def with_probe(page: str, probe: str) -> str:
    """The page with a few more lines of script, allowed by a policy of its own; they fill <pre id=probe>."""
    script = part(page, r"<script>(.*?)</script>")
    longer = script + (
        'const probe = document.createElement("pre"); probe.id = "probe";'
        f"probe.textContent = JSON.stringify({probe}); document.body.append(probe);"
    )
    return page.replace(script, longer).replace(sha256(script), sha256(longer))


def open_in_browser(page: str, folder: Path, place: str = "") -> str:
    """Return the document as a browser ends up with it; any console message fails."""
    if CHROMIUM is None:
        pytest.skip("needs chromium or google-chrome on the path")
    file = folder / "report.html"
    file.write_text(page, encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
               "--disable-background-networking", "--disable-component-update", "--disable-sync",
               f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=3000",
               "--enable-logging=stderr", "--dump-dom", f"{file.as_uri()}{place}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    console = [line for line in done.stderr.decode(errors="replace").splitlines() if "CONSOLE" in line]
    assert console == []
    return done.stdout.decode("utf-8")


def text_of(dom: str, identity: str) -> str:
    inside = part(dom, rf'<(?:p|pre|span|h2|ol)[^>]* ?id="{identity}"[^>]*>(.*?)</(?:p|pre|h2|ol)>')
    return html.unescape(re.sub(r"<[^>]*>", "", inside))


def test_a_browser_reads_every_weight_and_takes_no_text_for_markup(tmp_path):
    n = len(HOSTILE)
    weights, visible = causal_weights(2, 2, n, n)
    panels = [Panel("first", visible, weights), Panel("second<b>", visible, weights.flip(1))]
    page = render(panels, [HOSTILE, HOSTILE[::-1]], title="Title <i>", notes=["a note"])
    probe = f"""[0, 1].map((s) => [0, 1].map((l) => [0, 1].map((h) =>
      Array.from({{ length: {n * n} }}, (_, i) =>
        clearheadReport.weight(s, l, h, Math.floor(i / {n}), i % {n})))))"""
    dom = open_in_browser(with_probe(page, probe), tmp_path, "#s=1&l=1&h=1&q=3&k=2")
    got = torch.from_numpy(np.array(json.loads(text_of(dom, "probe")), dtype=float))  # null becomes NaN
    truth = torch.stack([weights, weights.flip(1)], 1).flatten(-2)  # (B, layers, H, L * S)
    assert torch.equal(got.isnan(), truth.isnan())
    assert (got - truth).nan_to_num().abs().max() <= 0.5001 / 65534

    expected = f"{weights[1, 0, 3, 2].item():.4f}"
    assert expected in text_of(dom, "readout")
    ranked = [float(w) for w in re.findall(r'class="number">([\d.]+)<', dom)]
    largest = weights[1, 0, 3].nan_to_num().sort(descending=True).values[: len(ranked)]
    assert len(ranked) == 4
    assert np.abs(np.array(ranked) - largest.numpy()).max() <= 6e-5
    assert "<h1>Title &lt;i&gt;</h1>" in dom
    for label in ("L0H0", "L1H1"):
        assert f'aria-label="{label}"' in dom
    assert "<img" not in dom
    assert "&lt;img src=x onerror=alert(1)&gt;" in dom


def test_a_browser_shows_a_pooled_page_with_its_exact_top_keys(tmp_path):
    panel = pooled_panel()
    assert panel.top is not None
    assert panel.mean is not None
    # from query 20, in the last of 5 rows of cells, one row up: to query 13, the first of cell 3
    probe = """(() => {
      const up = new KeyboardEvent("keydown", { key: "ArrowUp" });
      document.getElementById("overlay").dispatchEvent(up);
      const keys = Array.from({ length: 23 }, (_, key) => key);
      return keys.map((key) => clearheadReport.weight(0, 0, 1, 13, key) ?? null);
    })()"""
    page = with_probe(render([panel], labels(1, 23), title="Pooled"), probe)
    dom = open_in_browser(page, tmp_path, "#h=1&q=20&map=maximum")
    weights, keys = (tensor[0, 1, 13].tolist() for tensor in panel.top)
    got = json.loads(text_of(dom, "probe"))
    for key in range(23):
        if key in keys:
            assert abs(got[key] - weights[keys.index(key)]) <= 0.5001 / 65534
        else:
            assert got[key] is None
    readout = text_of(dom, "readout")
    assert "from 13–18" in readout
    strongest = int(panel.top[1][0, 1, 20, 0])
    cell = max(c for c in range(5) if c * 23 // 5 <= strongest)
    mean = panel.mean[0, 1, 3, cell].item()
    shown = float(part(readout, r"mean ([\d.e-]+), maximum"))
    assert abs(shown - mean) <= max(5.1e-5, 2**-11 * mean)
    assert "are exact" in text_of(dom, "mode")


def test_a_browser_follows_pointer_keys_and_permalinks(tmp_path):
    weights, visible = causal_weights(1, 2, 6, 6)
    panels = [Panel("a", visible, weights), Panel("b", visible, weights)]
    # each step acts as a reader would and returns the permalink it leads to
    probe = """(() => {
      const map = document.getElementById("overlay"), box = map.getBoundingClientRect();
      const press = (target, key) =>
        target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
      const seen = [];
      const note = () => seen.push(location.hash);
      document.activeElement.blur();
      press(document.body, "ArrowDown"); press(document.body, "ArrowRight"); note();
      press(map, "Enter"); press(map, "ArrowDown"); press(map, "ArrowRight"); note();
      press(document.body, "Escape"); note();
      document.querySelectorAll("#query-strip .piece")[3].click(); note();
      const query = document.getElementById("query");
      query.value = "5"; query.dispatchEvent(new Event("input")); note();
      query.value = "77"; query.dispatchEvent(new Event("input")); note();
      const reached = new Set();
      for (let x = 1; x < box.width; x += 3) {
        const at = { clientX: box.left + x, clientY: box.bottom - 6, bubbles: true };
        map.dispatchEvent(new MouseEvent("click", at));
        reached.add(location.hash);
      }
      return [seen, [...reached].filter((hash) => hash.includes("q="))];
    })()"""
    dom = open_in_browser(with_probe(render(panels, labels(1, 6), title="t"), probe), tmp_path)
    (heads, moved, released, clicked, typed, refused), reached = json.loads(text_of(dom, "probe"))
    strongest = weights[0, 1].nan_to_num().argmax(-1).tolist()
    assert heads == "#s=0&l=1&h=1&scale=one"
    assert moved == "#s=0&l=1&h=1&q=1&k=1&scale=one"
    assert released == heads
    assert clicked == f"#s=0&l=1&h=1&q=3&k={strongest[3]}&scale=one"
    assert typed == refused == f"#s=0&l=1&h=1&q=5&k={strongest[5]}&scale=one"
    assert {re.sub(r".*&k=(\d+)&.*", r"\1", place) for place in reached} == set("012345")
    assert all("&q=5&" in place for place in reached)
