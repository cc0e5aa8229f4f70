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
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

import sparsity
from examples.mnist import moves
from examples.mnist.network import Network, TrainState

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"]
DARK_COLOURS = ["#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442"]


def style(background: str, text: str, faint: str, colours: list[str]) -> dict[str, Any]:
    """Returns matplotlib's settings for a background."""
    names = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(names, text),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), background),
        "axes.edgecolor": faint,
        "axes.grid": True,
        "axes.prop_cycle": mpl.cycler(color=colours),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": "medium",
        "figure.constrained_layout.use": True,
        "font.size": 11,
        "grid.alpha": 0.35,
        "grid.color": faint,
        "legend.frameon": False,
        "lines.linewidth": 2,
        "savefig.dpi": 130,
    }


STYLES = {
    "light": style("#FFFFFF", "#1F2328", "#8C959F", COLOURS),
    "dark": style("#0D1117", "#E6EDF3", "#6E7681", DARK_COLOURS),
}


def draw_all(
    networks: dict[str, Network],
    trained: dict[str, TrainState],
    history: dict[str, list[Any]],
    folder: Path,
) -> list[Path]:
    """Writes all pictures to `folder`, as NAME_light.png and NAME_dark.png; returns their paths."""
    names = {role: network.name for role, network in networks.items()}
    draw: dict[str, Callable[[], Figure]] = {
        "accuracy": lambda: draw_accuracy(history["evaluations"], names),
        "layers": lambda: draw_layers(networks["sparse"], trained["sparse"]),
        "first_layer": lambda: draw_first_layer(networks, trained),
        "moves": lambda: draw_moves(history["mask_updates"], names["sparse"]),
    }
    paths = []
    for theme, settings in STYLES.items():
        for name, make in draw.items():
            if name == "moves" and not history["mask_updates"]:
                continue
            with mpl.rc_context(settings):
                figure = make()
                paths.append(folder / f"{name}_{theme}.png")
                figure.savefig(paths[-1])
                plt.close(figure)
    return paths


def draw_accuracy(evaluations: list[dict[str, Any]], names: dict[str, str]) -> Figure:
    """Test accuracy and sparsity over the steps."""
    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(8, 5.4), height_ratios=(3, 2))
    steps = [row["step"] for row in evaluations]
    for role, line in zip(names, ("--", "-"), strict=True):
        accuracy = [row[role]["accuracy"] for row in evaluations]
        zeros = [row[role]["sparsity"] for row in evaluations]
        top.plot(steps, accuracy, line, label=f"{names[role]}: {accuracy[-1]:.1%} in the end")
        bottom.plot(steps, zeros, line, label=f"{names[role]}: {zeros[-1]:.1%} zeros in the end")
    late = [row[role]["accuracy"] for row in evaluations[len(steps) // 10 :] for role in names]
    spread = max(late) - min(late) + 0.005
    top.set_ylim(min(late) - 0.1 * spread, max(late) + 0.15 * spread)
    top.set_title("Accuracy on images that were not trained with")
    bottom.set_title("Sparsity: share of the weights that are zero")
    bottom.set_ylim(-0.04, 1.04)
    bottom.set_xlabel("training step")
    for ax in (top, bottom):
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        ax.legend(loc="best")
    return figure


def draw_layers(network: Network, state: TrainState) -> Figure:
    """Sparsity of every layer beside its target."""
    ax = sparsity.plot_sparsity(network.used_params(state), state.opt_state, network.updater)
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
    colours = {"cmap": "PuOr", "vmin": -limit, "vmax": limit}
    figure, axes = plt.subplots(1, 3, figsize=(10, 4.9))
    tiles = [kernels["dense"], np.where(mask, kernels["sparse"], np.nan), mask]
    titles = [
        "dense weights",
        f"{networks['sparse'].name}: weights",
        f"mask: {mask.mean():.0%} kept",
    ]
    for ax, tile, title in zip(axes, tiles, titles, strict=True):
        image = ax.imshow(tile_filters(tile), **(colours if tile is not mask else {"cmap": "gray"}))
        ax.set_title(title)
        ax.set_axis_off()
        if ax is axes[1]:
            figure.colorbar(image, ax=axes[:2], location="bottom", shrink=0.4, aspect=40)
    return figure


def draw_moves(updates: list[dict[str, Any]], name: str) -> Figure:
    """What each mask update took out of use, and which weights are and have been in use."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2))
    steps = [row["step"] for row in updates]
    layers = [layer for layer in updates[0]["churn"] if layer != "total"]
    for layer in layers:
        (line,) = left.plot(steps, [row["churn"][layer] for row in updates], label=layer)
        right.plot(steps, [row["active"][layer] for row in updates], color=line.get_color())
        ever = [row["ever_active"][layer] for row in updates]
        right.plot(steps, ever, ":", color=line.get_color())
    left.set_title(f"{name}: active weights that an update dropped")
    right.set_title("Active weights (lines), ever active (dots)")
    for ax in (left, right):
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        ax.set_ylim(0)
        ax.set_xlabel("training step")
    left.legend()
    return figure


def tile_filters(kernel: np.ndarray, columns: int = 4) -> np.ndarray:
    """Lays the filters [H, W, 1, N] out in rows of `columns`, with gaps of NaN between them."""
    filters = np.pad(
        kernel[:, :, 0].transpose(2, 0, 1).astype(float),
        ((0, -kernel.shape[-1] % columns), (0, 1), (0, 1)),
        constant_values=np.nan,
    )
    _, height, width = filters.shape
    rows = filters.reshape(-1, columns, height, width).transpose(0, 2, 1, 3)
    return rows.reshape(-1, columns * width)[:-1, :-1]
