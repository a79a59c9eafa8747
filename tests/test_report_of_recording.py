"""From a recording to the page and to plots: shapes, masks and selections."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead.panels import panels_of
from clearhead.view.report import render

pytest.importorskip("matplotlib", reason="needs the view extra")


def recorded(observe: ch.Observe, mask: ch.Mask | None = None, length: int = 7) -> ch.Recording:
    torch.manual_seed(0)
    layers = torch.nn.ModuleList([ch.MultiHeadAttention(12, 3) for _ in range(2)])
    x = torch.randn(2, length, 12)
    with ch.record(layers, observe) as recording:
        for layer in layers:
            x = layer(x, mask=mask)
    return recording


@pytest.mark.parametrize("n", [2, 3, 5, 7, 11])
def test_pooled_cells_are_visible_where_some_pair_is(n: int) -> None:
    mask = ch.Causal() & ch.KeyPadding([7, 4])
    recording = recorded(ch.Observe(pooled=n, top_k=2), mask)
    panel = panels_of(list(recording.items()))[1]
    dense = (mask & ch.QueryPadding([7, 4])).dense(7, 7)[:, 0]
    for b in range(2):
        for i in range(n):
            for j in range(n):
                rows = slice(i * 7 // n, -(-(i + 1) * 7 // n))
                columns = slice(j * 7 // n, -(-(j + 1) * 7 // n))
                assert panel.visible[b, 0, i, j] == dense[b, rows, columns].any()


def test_a_page_needs_weights_or_pooled_maps(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has nothing to draw: record with Observe\(weights=True\)"):
        recorded(ch.Observe(entropy=True)).to_html(tmp_path / "page.html")
    with pytest.raises(ValueError, match="nothing was recorded"):
        ch.Recording(["layer"]).to_html(tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_a_page_is_written_once_and_replaced_only_when_told(tmp_path: Path) -> None:
    recording, path = recorded(ch.Observe(weights=True)), tmp_path / "page.html"
    labels = [["a", "b", "c", "d", "e", "f", "g"]] * 2
    assert recording.to_html(path, labels) == path
    first = path.read_text(encoding="utf-8")
    with pytest.raises(FileExistsError):
        recording.to_html(path, labels)
    assert path.read_text(encoding="utf-8") == first
    recording.to_html(path, labels, title="again", overwrite=True)
    assert "again" in path.read_text(encoding="utf-8")


def test_label_counts_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="7"):
        recorded(ch.Observe(weights=True)).to_html(tmp_path / "page.html", [["a", "b"]] * 2)


def test_a_plot_shows_the_weights_and_greys_what_is_hidden() -> None:
    x = torch.randn(2, 3, 5, 4)
    _, seen = ch.attention(x, x, x, ch.Causal(), observe=ch.Observe(weights=True))
    figure = seen.plot(heads=[2, -3], batch=1, tokens=["a", "$\\frac$", "c", "[/b]", "e"])
    maps = [axes for axes in figure.axes if axes.get_title().startswith("head")]
    assert [axes.get_title() for axes in maps] == ["head 2", "head 0"]
    drawn = maps[0].images[0].get_array()
    hidden = torch.ones(5, 5).triu(1).bool()
    assert torch.equal(torch.from_numpy(drawn.mask.copy()), hidden)
    torch.testing.assert_close(torch.from_numpy(drawn.data.copy())[~hidden], seen.weights[1, 2][~hidden])
    figure.draw_without_rendering()  # a label that were read as mathematics would raise here
    assert [label.get_text() for label in maps[0].get_yticklabels()][1] == "$\\frac$"


def test_a_plot_refuses_what_it_cannot_show() -> None:
    x = torch.randn(2, 3, 5, 4)
    _, seen = ch.attention(x, x, x, observe=ch.Observe(weights=ch.At(heads=[0])))
    with pytest.raises(ValueError, match=r"plot shows whole maps"):
        seen.plot()
    _, seen = ch.attention(x, x, x, observe=ch.Observe(weights=True))
    with pytest.raises(ValueError, match="5 labels, one for each position, not 1"):
        seen.plot(tokens=["a"])
    with pytest.raises(IndexError, match="batch item 2 is out of range: there are 2"):
        seen.plot(batch=2)
    with pytest.raises(IndexError, match=r"heads=3"):
        seen.plot(heads=[3])
    _, seen = ch.attention(x, x, x, observe=ch.Observe(entropy=True))
    with pytest.raises(AttributeError, match="weights was not asked for"):
        seen.plot()


@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4)])
def test_a_plot_of_inputs_without_head_axis(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    _, seen = ch.attention(x, x, x, observe=ch.Observe(weights=True))
    assert len(seen.plot().axes) == 2  # the map and its colour bar


@pytest.mark.parametrize("observe", [{"weights": ch.At(heads=[2, 0])}, {"pooled": 4, "top_k": 2}])
def test_a_page_of_some_heads_calls_them_by_their_numbers(tmp_path: Path, observe: dict[str, Any]) -> None:
    recording = recorded(ch.Observe(entropy=True, **observe), ch.Causal())
    panels = panels_of(list(recording.items()), numbers=[4, 7], heads=[0, 2])
    assert [(panel.number, panel.heads) for panel in panels] == [(4, [0, 2]), (7, [0, 2])]
    for panel, seen in zip(panels, recording.values(), strict=True):
        assert panel.entropy is not None
        assert torch.equal(panel.entropy, seen.entropy[:, [0, 2]])
        if panel.weights is not None:  # kept in the order 2, 0
            assert torch.equal(panel.weights, seen.weights.flip(1))
        else:
            assert panel.mean is not None
            assert torch.equal(panel.mean, seen.pooled[0][:, [0, 2]])
    if "weights" in observe:
        page = recording.to_html(tmp_path / "page.html").read_text(encoding="utf-8")
        assert page.count('"numbers":[2,0]') == 2
    with pytest.raises(ValueError, match="has 3 heads, and 2 numbers"):
        render(
            [replace(panels_of(list(recorded(ch.Observe(weights=True)).items()))[0], heads=[1, 2])],
            [["x"] * 7] * 2,
            title="t",
        )
