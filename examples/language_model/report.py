"""Writes the table and the pictures of all methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, PercentFormatter

Rows = list[dict[str, Any]]

# Backgrounds, texts and lines; colours of Okabe and Ito, which everyone can tell apart.
THEMES = {
    "light": ("#FFFFFF", "#1F2328", ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8C959F"]),
    "dark": ("#0D1117", "#E6EDF3", ["#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#6E7681"]),
}
MARKERS = "ovs^Dx"


def write(rows: Rows, folder: Path) -> None:
    """Writes table.md, and each picture for a light and for a dark background."""
    (folder / "table.md").write_text(f"{make_table(rows)}\n\n{list_sentences(rows)}\n")
    for theme, (background, text, colours) in THEMES.items():
        settings = {
            **dict.fromkeys(("figure.facecolor", "axes.facecolor"), background),
            **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), text),
            **dict.fromkeys(("xtick.color", "ytick.color"), text),
            "axes.prop_cycle": mpl.cycler(color=[*colours, text]),
            **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
        }
        with mpl.rc_context(settings):
            figure = draw(rows)
            figure.savefig(folder / f"language_model_{theme}.png", dpi=130)
            plt.close(figure)


def make_table(rows: Rows) -> str:
    lines = [
        "| sparsity | method | essay | handbook | CPU seconds | peak, MB |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        texts = " | ".join(f"{x:.1f}" for x in row["perplexity"].values())
        costs = f"{row['seconds']:.0f} | {row['peak']:,.0f}" if row["kind"] else " | "
        lines.append(f"| {row['kind'] or '—'} | {row['method']} | {texts} | {costs} |")
    return "\n".join(lines)


def list_sentences(rows: Rows) -> str:
    chosen = [row for row in rows if row["kind"] in ("", "50 %")]
    return "\n".join(f"- {row['method']}: {' '.join(row['sentence'].split())}" for row in chosen)


def draw(rows: Rows) -> Figure:
    """Draws the perplexity against the sparsity, and the error after each layer at 50 %."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    dense, *pruned = rows
    for method, marker in zip(
        dict.fromkeys(row["method"] for row in pruned), MARKERS, strict=False
    ):
        chosen = [row for row in pruned if row["method"] == method]
        points = {0.0: dense} | {
            float(row["kind"][:-2]) / 100: row for row in chosen if row["kind"].endswith(" %")
        }
        perplexities = [row["perplexity"]["handbook"] for row in points.values()]
        left.semilogy([*points], perplexities, marker=marker, label=method)
        errors = points[0.5]["errors"]
        right.semilogy(range(1, len(errors) + 1), errors, marker=marker, markersize=4)
    left.set(title="Perplexity of the handbook", xlabel="sparsity of the layers")
    left.xaxis.set_major_formatter(PercentFormatter(1))
    others = [row["perplexity"]["handbook"] for row in rows if row["method"] != "magnitude"]
    left.set_ylim(top=1.5 * max(others))  # magnitudes leave the picture
    for axis, form in ((left.yaxis, "{x:g}"), (right.yaxis, "{x:.0%}")):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(form)
        axis.set_minor_locator(NullLocator())
    right.set(title="Relative error after each layer at 50 %", xlabel="layer")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return figure
