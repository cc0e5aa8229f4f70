"""Writes what the stored results say: RESULTS.md and a plot for each task."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from baselines import channels, store, training

# ResNet-50 on ImageNet at 80 %, JaxPruner (Lee et al. 2023): from the best to the worst.
PAPER = (
    *("magnitude", "global_magnitude", "saliency", "rigl", "set"),
    *("magnitude_ste", "static_sparse", "random"),
)
SEEDS, MEAN = "#0072B2", "#D55E00"  # colours
LABELS = {
    "adam": "peak learning rate of Adam",
    "adamw": "peak learning rate of AdamW",
    "max_norm": "gradients clipped to a norm of",
    "trace": "trace of advantages",
}

Results = dict[store.Job, store.Result]
Found = tuple[training.Task, Results]


def write(tasks: Sequence[training.Task]) -> None:
    """Renews RESULTS.md and the plots from what is stored; a task without results is left out."""
    found = [(task, results) for task in tasks if (results := store.load(task))]
    if not found:
        sys.exit("No result of the present settings is stored.")
    for task, results in found:
        draw(task, results).savefig(store.FOLDER / f"{task.name}.png", dpi=150)
    of_weights = [pair for pair in found if not isinstance(pair[0], channels.ChannelTask)]
    sections = (section(*pair) for pair in found)
    parts = [introduction(found), summary(of_weights), *sections, order(of_weights)]
    path = store.FOLDER / "RESULTS.md"
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"{len(found)} of {len(tasks)} tasks: {path}")


def introduction(found: Sequence[Found]) -> str:
    start, end = training.RAMP
    rows = [row for _, results in found for row in results.values()]
    made = (
        ", ".join(sorted({row[key] for row in rows})) for key in ("date", "machine", "versions")
    )
    return f"""# Baselines

`bash run.sh baselines` made these results: {"; ".join(made)}.
Mean and standard deviation over seeds; every seed has its own initial weights, data order and
random masks, and all seeds of a row are trained side by side in one program. Seconds are those of
a row, with its compilation and whatever else the machine did: they say how long to wait, not which
algorithm is faster.

All algorithms of a task have the same settings. Layers share the sparsity by ERK, global pruners by
their threshold: of scores divided by the norm of their leaf, or as they are in the rows named
`(raw)`. Pruners follow a cubic ramp from {start:.0%} to {end:.0%} of the steps with about
{training.MASK_UPDATES} mask updates. SET and RigL move their masks about {training.MASK_UPDATES}
times until {end:.0%} of the steps, at first {training.DROP_FRACTION:.0%} of the active weights,
along a cosine to none, and so do SRigL and global RigL; static masks stay. Straight-through methods
are sparse from the first step. Top-KAST and ADMM renew their sets as often, AC/DC has
{training.PHASES} phases along the ramp, and SNIP prunes in the first step. GraSP and SynFlow choose
a static mask for the initial weights, GraSP by {training.BATCHES} batches. A lottery ticket takes
{training.ROUNDS} rounds of pruning, each after a whole training, so that it costs
{training.ROUNDS + 1} times as much as the others; its weights are rewound to the initial ones.

Tasks of whole channels name the part of the multiply-adds that goes, under `Coupled(graph)`.
Their `static_sparse` is a dense network of that size: it never had the channels that it lacks."""


def summary(found: Sequence[Found]) -> str:
    """One table of all tasks."""
    heads = [f"{task.name} {target:.0%}" for task, _ in found for target in task.sparsities]
    rows = [
        [f"`{name}`", *map(cell, runs)]
        for name in store.row_names()
        if any(runs := runs_of(name, found))
    ]
    return table(["algorithm", *heads], rows)


def section(task: training.Task, results: Results) -> str:
    """Heading, settings, table and plot of a task."""
    settings = ", ".join(
        f"{LABELS.get(key, key.replace('_', ' '))} {x:g}" for key, x in task.settings.items()
    )
    missed = max(abs(x - target) for (_, target), row in results.items() for x in row["sparsity"])
    rows = []
    for name in store.row_names():
        runs = runs_of(name, [(task, results)])
        if any(runs):
            seconds = {id(row): f"{row['seconds']:.0f}" for row in runs if row}  # dense: one run
            rows.append([f"`{name}`", *map(cell, runs), " / ".join(seconds.values())])
    heads = ["algorithm", *(f"{target:.0%}" for target in task.sparsities), "seconds"]
    better = "higher" if task.higher_is_better else "lower"
    return (
        f"## {task.title}\n\n{task.metric[0].upper()}{task.metric[1:]}; {better} is better. "
        f"{task.seeds} seeds; {settings}. Achieved sparsities are within {100 * missed:.2g} points "
        f"of what is named.\n\n{table(heads, rows)}\n\n"
        f"![{task.title}]({task.name}.png)"
    )


def runs_of(name: str, found: Sequence[Found]) -> list[store.Result | None]:
    """Results of a row, by task and sparsity; those of the dense network for each."""
    return [
        results.get((name, 0.0 if name == "no_prune" else target))
        for task, results in found
        for target in task.sparsities
    ]


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(row: store.Result | None) -> str:
    """Mean and deviation; the mean with four digits."""
    if not row:
        return ""
    decimals = 4 - len(f"{mean(row):.0f}")
    return f"{mean(row):.{decimals}f} ± {deviation(row):.{decimals}f}"


def mean(row: store.Result) -> float:
    return float(np.mean(row["metric"]))


def deviation(row: store.Result) -> float:
    return float(np.std(row["metric"], ddof=1))


def ranking(task: training.Task, results: Results, target: float) -> list[str]:
    """Algorithms at a sparsity, from the best to the worst."""
    names = [name for name, at in results if at == target and name != "no_prune"]
    sign = -1 if task.higher_is_better else 1
    return sorted(names, key=lambda name: sign * mean(results[name, target]))


def order(found: Sequence[Found]) -> str:
    """How the order of the algorithms compares with that of the paper."""
    lines = [
        "## Order",
        "",
        f"In the paper, ResNet-50 at 80 %: {' > '.join(PAPER)}. A pair of algorithms is undecided "
        "if their means differ by no more than the larger of the two deviations; otherwise it "
        "agrees with that order or not.",
        "",
        "| task | from the best to the worst | pairs that agree | undecided | disagree |",
        "| --- | --- | ---: | ---: | --- |",
    ]
    for task, results in found:
        for target in task.sparsities:
            ranked = ranking(task, results, target)
            agree, undecided, against = compare(task, results, target)
            lines.append(
                f"| {task.name} {target:.0%} | {', '.join(ranked)} | {agree} | {undecided} | "
                f"{', '.join(f'{b} > {a}' for a, b in against) or 'none'} |"
            )
    return "\n".join(lines)


def compare(
    task: training.Task, results: Results, target: float
) -> tuple[int, int, list[tuple[str, str]]]:
    """Pairs of the paper's order: how many agree, are undecided, and those that disagree."""
    agree, undecided, against = 0, 0, []
    sign = 1 if task.higher_is_better else -1
    for better, worse in itertools.combinations(PAPER, 2):
        rows = [results.get((name, target)) for name in (better, worse)]
        if not all(rows):
            continue
        lead = sign * (mean(rows[0]) - mean(rows[1]))
        if abs(lead) <= max(map(deviation, rows)):
            undecided += 1
        elif lead > 0:
            agree += 1
        else:
            against.append((better, worse))
    return agree, undecided, against


def draw(task: training.Task, results: Results) -> Figure:
    """Each algorithm's seeds, mean and deviation; a panel for each sparsity."""
    names, dense = ranking(task, results, task.sparsities[-1]), results.get(("no_prune", 0.0))
    height, width = 1.3 + 0.24 * len(names), 2 + 2.3 * len(task.sparsities)
    with matplotlib.rc_context(
        {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure = Figure(figsize=(max(8, width), height), layout="constrained")
        panels = figure.subplots(1, len(task.sparsities), sharey=True, squeeze=False)[0]
        for ax, target in zip(panels, task.sparsities, strict=True):
            draw_points(ax, [results.get((name, target)) for name in names])
            ax.set_xlabel(f"{target:.0%} sparsity")
            if dense:
                ax.axvline(mean(dense), color="black", linestyle=":", label="dense")
        panels[0].set_yticks(range(len(names)), names)
        panels[0].set_ylim(len(names) - 0.5, -0.5)
        if dense:
            panels[0].legend(loc="best", frameon=False)
        figure.suptitle(f"{task.title}: {task.metric}, {task.seeds} seeds", fontsize="large")
    return figure


def draw_points(ax: Any, rows: Sequence[store.Result | None]) -> None:
    means = [mean(row) for row in rows if row]
    low, middle, high = np.percentile(means, [25, 50, 75])
    # What is far worse than most is a number at the edge: others can be told apart.
    least, most = middle - 5 * (high - low), middle + 5 * (high - low)
    for i, row in enumerate(rows):
        if not row:
            continue
        if least <= mean(row) <= most:
            seeds = [x for x in row["metric"] if least <= x <= most]
            ax.plot(seeds, [i] * len(seeds), "o", color=SEEDS, alpha=0.35, ms=4)
            ax.errorbar(mean(row), i, xerr=deviation(row), fmt="D", color=MEAN, capsize=3)
            continue
        x, sign, align = (0, "◂", "left") if mean(row) < least else (1, "▸", "right")
        text = f"{sign} {mean(row):.4g}"
        at = ax.get_yaxis_transform()  # x from 0 to 1 across the panel
        ax.text(x, i, text, transform=at, ha=align, va="center", color=MEAN, fontsize="small")
    ax.grid(alpha=0.25)
