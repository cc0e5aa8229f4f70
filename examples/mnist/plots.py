"""Pictures of a run, each for a light and for a dark background.

Colours are those of Okabe and Ito, which people with any kind of colour vision can tell apart;
lines differ in style, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

import sparsity
from examples.mnist import moves
from examples.mnist.network import Network, TrainState


def style(background: str, faint: str, grey: str, text: str, **settings: Any) -> dict[str, Any]:
    """Returns matplotlib's settings for a background; `faint` marks pruned weights."""
    texts = ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor")
    return {
        **dict.fromkeys(texts, text),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), background),
        **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), grey),
        "axes.grid": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": "medium",
        "figure.constrained_layout.use": True,
        "font.size": 11,
        "grid.alpha": 0.35,
        "legend.frameon": False,
        "lines.linewidth": 2,
        "patch.edgecolor": faint,
        "savefig.dpi": 130,
        **settings,
    }


STYLES = {
    "light": style(
        *("#FFFFFF", "#E4E8EC", "#8C959F", "#1F2328"),
        **{
            "axes.prop_cycle": mpl.cycler(color=["#0072B2", "#D55E00", "#009E73", "#CC79A7"]),
            "image.cmap": "PuOr",  # zero is light, large weights are dark
        },
    ),
    "dark": style(
        *("#0D1117", "#262C36", "#6E7681", "#E6EDF3"),
        **{
            "axes.prop_cycle": mpl.cycler(color=["#56B4E9", "#E69F00", "#009E73", "#CC79A7"]),
            "image.cmap": "managua_r",  # zero is dark, large weights are light
        },
    ),
}


def draw_all(
    networks: dict[str, Network],
    trained: dict[str, TrainState],
    history: dict[str, list[Any]],
    is_cut: bool,
    folder: Path,
) -> list[Path]:
    """Writes all pictures to `folder`, as NAME_light.png and NAME_dark.png; returns their paths."""
    names = {role: network.name for role, network in networks.items()}
    draw: dict[str, Callable[[], Figure]] = {"accuracy": lambda: draw_accuracy(history, names)}
    if not is_cut:
        draw["layers"] = lambda: draw_layers(networks["sparse"], trained["sparse"])
        draw["first_layer"] = lambda: draw_first_layer(networks, trained)
    if history["mask_updates"]:
        draw["moves"] = lambda: draw_moves(history["mask_updates"], names["sparse"])
    paths = []
    for theme, settings in STYLES.items():
        for name, make in draw.items():
            with mpl.rc_context(settings):
                figure = make()
                paths.append(folder / f"{name}_{theme}.png")
                figure.savefig(paths[-1])
                plt.close(figure)
    return paths


def draw_accuracy(history: dict[str, list[Any]], names: dict[str, str]) -> Figure:
    """Test accuracy and sparsity over the steps."""
    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(8, 5.2), height_ratios=(3, 2))
    rows = history["evaluations"]
    steps = [row["step"] for row in rows]
    for role, line in zip(names, ("--", "-"), strict=True):
        accuracy = [row[role]["accuracy"] for row in rows]
        zeros = [row[role]["sparsity"] for row in rows]
        top.plot(steps, accuracy, line, label=f"{names[role]}, {accuracy[-1]:.1%} in the end")
        bottom.plot(steps, zeros, line, label=f"{names[role]}, {zeros[-1]:.1%} in the end")
    late = [row[role]["accuracy"] for row in rows[len(rows) // 10 :] for role in names]
    spread = max(max(late) - min(late), 0.02)
    top.set_ylim(max(late) - 1.1 * spread, max(late) + 0.1 * spread)
    top.set_title("Accuracy on images that were not trained with")
    bottom.set_title("Sparsity: share of the weights that are zero")
    bottom.set_ylim(-0.04, 1.04)
    bottom.set_xlabel("training step")
    updates = [row["step"] for row in history["mask_updates"]]
    for ax in (top, bottom):
        if updates:
            span = {"color": mpl.rcParams["patch.edgecolor"], "zorder": 0}
            label = "masks change" if ax is top else None
            ax.axvspan(updates[0], updates[-1], label=label, **span)
        for kind, label in (("cuts", "cut"), ("compactions", "compact from here")):
            for row in filter(lambda row: row["step"], history[kind]):
                ax.axvline(row["step"], linestyle=":", label=label if ax is top else None)
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=1 if ax is top else 0))
        ax.legend(loc="lower right" if ax is top else "center right")
    return figure


def draw_layers(network: Network, state: TrainState) -> Figure:
    """Sparsity of every layer beside its target."""
    ax = sparsity.reports.plot_sparsity(
        network.used_params(state), state.opt_state, network.updater
    )
    ax.grid(visible=False)
    return ax.figure


def draw_first_layer(networks: dict[str, Network], trained: dict[str, TrainState]) -> Figure:
    """The filters of the first layer, dense and sparse, and the mask of the sparse ones."""
    kernels = {
        role: np.asarray(network.used_params(trained[role])["conv1"]["kernel"])
        for role, network in networks.items()
    }
    mask = moves.active_masks(networks["sparse"], trained["sparse"])["conv1"]["kernel"]
    mask = np.ones(kernels["sparse"].shape) if mask is None else np.asarray(mask)
    limit = max(np.abs(kernel).max() for kernel in kernels.values())
    faint, text = mpl.rcParams["patch.edgecolor"], mpl.rcParams["text.color"]
    figure, axes = plt.subplots(1, 3, figsize=(11, 2.5))
    name = networks["sparse"].name
    titles = ["dense: weights", f"{name}: weights", f"{name}: mask, {mask.mean():.0%} kept"]
    tiles = [kernels["dense"], np.where(mask, kernels["sparse"], np.nan), np.where(mask, 1, np.nan)]
    for ax, title, tile in zip(axes, titles, tiles, strict=True):
        ax.imshow(tile_filters(np.zeros_like(tile)), cmap=ListedColormap([faint]))
        colours = {"cmap": ListedColormap([text])} if ax is axes[2] else {}
        image = ax.imshow(tile_filters(tile), vmin=-limit, vmax=limit, **colours)
        ax.set_title(title)
        ax.set_axis_off()
        if ax is axes[1]:
            bar = figure.colorbar(image, ax=axes, location="bottom", shrink=0.3, aspect=40)
            bar.outline.set_visible(False)
    return figure


def draw_moves(updates: list[dict[str, Any]], name: str) -> Figure:
    """What each mask update took out of use, and which weights are and have been in use."""
    figure, (first, second) = plt.subplots(1, 2, figsize=(10, 4.2))
    steps = [row["step"] for row in updates]
    layers = [layer for layer in updates[0]["churn"] if layer != "total"]
    for i, layer in enumerate(layers):
        line = {"color": f"C{i}", "lw": 1.5 + 1.2 * (len(layers) - 1 - i)}  # all stay visible
        first.plot(steps, [row["churn"][layer] for row in updates], label=layer, **line)
        second.plot(steps, [row["active"][layer] for row in updates], **line)
        second.plot(steps, [row["ever_active"][layer] for row in updates], f"C{i}:")
    first.set_title(f"{name}: weights in use that an update dropped")
    second.set_title("Weights in use (lines), used at any time (dots)")
    for ax in (first, second):
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        ax.set_ylim(0)
        ax.set_xlabel("training step")
    first.legend()
    return figure


def tile_filters(kernel: np.ndarray, columns: int = 8) -> np.ndarray:
    """Lays the filters [H, W, 1, N] out in rows of `columns`, with gaps of NaN between them."""
    filters = np.pad(
        kernel[:, :, 0].transpose(2, 0, 1).astype(float),
        ((0, -kernel.shape[-1] % columns), (0, 1), (0, 1)),
        constant_values=np.nan,
    )
    _, height, width = filters.shape
    rows = filters.reshape(-1, columns, height, width).transpose(0, 2, 1, 3)
    return rows.reshape(-1, columns * width)[:-1, :-1]
