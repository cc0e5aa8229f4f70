"""The benchmarks run, and their report keeps the sections of the others."""

import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks import (
    calibration,
    compact,
    compact_move,
    compact_state,
    compact_steps,
    compile as compiling,
    deltas,
    finetuning,
    grouped,
    results,
    selection,
    train_step,
)

pytestmark = pytest.mark.slow


def test_a_section_is_replaced_and_the_others_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path / "RESULTS.md")
    for text in ("## One\n\nold", "## Two\n\nkept\n\n### Part\n\nof it", "## One\n\nnew"):
        results.write_section(text)
    expected = "# Results\n\n## Two\n\nkept\n\n### Part\n\nof it\n\n## One\n\nnew\n"
    assert results.RESULTS.read_text(encoding="utf-8") == expected


def test_a_table_has_a_row_a_line_and_numbers_to_the_right():
    assert results.table(["name", "x"], [["a", "1.25"], ["long one", "2"]]).splitlines() == [
        "| name     |    x |",
        "| -------- | ---: |",
        "| a        | 1.25 |",
        "| long one |    2 |",
    ]


def test_rivals_of_the_selection_keep_the_same_entries():
    x = jnp.abs(jax.random.normal(jax.random.key(0), (1000,)))
    masks = [
        selection.argsort_mask(x, 200),
        selection.top_k_mask(x, 200),
        selection.bisection_mask(x, 200),
        selection.selection.topk_mask(x, 200),
    ]
    assert all((mask == masks[0]).all() and mask.sum() == 200 for mask in masks)


def test_selection_is_measured_beside_its_rivals():
    x = jnp.abs(jax.random.normal(jax.random.key(0), (1000,)))
    row = selection.selection_row("normal", x, rounds=2, rivals=True)
    assert row[:2] == ["1e+03", "normal"]
    assert all(float(cell) >= 0 for cell in row[2:])


@pytest.mark.parametrize("name", ["magnitude", "rigl"])
def test_steps_are_measured_beside_dense_ones(name):
    row = train_step.measure(train_step.make_updater(name, True), (8, 16, 8), 3, 2)
    assert all(float(cell) >= 0 for cell in row)


def test_reconstructions_are_measured_beside_the_factors():
    rows = calibration.measure(16, 1)
    assert rows[0][0] == "Cholesky and triangular inverse"
    assert all(float(cell) >= 0 for row in rows for cell in row[1:])


@pytest.mark.parametrize("name", ["adam", "coupled", "rigl", "argsort"])
def test_the_first_update_is_measured_in_all_its_parts(name):
    *seconds, temporaries, donated = compiling.measure("few", name)
    assert len(seconds) == 3
    assert min(seconds) > 0
    assert min(temporaries, donated) >= 0
    assert "| few " in compiling.report([["few", name, *seconds, temporaries, donated]])


def test_the_trees_are_those_that_the_report_names():
    sizes = {tree: compiling.shapes(tree) for tree in ("resnet50", "transformer")}
    assert {tree: len(x) for tree, x in sizes.items()} == {"resnet50": 54, "transformer": 224}
    weights = sum(math.prod(x) for x in sizes["resnet50"])
    assert weights == 25_502_912  # with a head of 1000 classes, without biases and norms


def test_groups_are_measured_beside_dense_products():
    ratios = grouped.measure(64, 2, 0.9, 1)
    assert len(ratios) == 2 * len(grouped.GROUPS)
    assert min(ratios) > 0


def test_compact_states_are_measured_beside_wrapped_ones():
    rows = compact_state.measure((64, 128), 0.9, 2)
    # Adam's two moments of 8 bytes, and masks of a byte or a bit; compact: 12 bytes a kept weight.
    assert [row[2] for row in rows] == ["9.00", "8.13", "2.20", "1.33"]


def test_compact_steps_are_measured_beside_masked_and_dense_ones(monkeypatch):
    monkeypatch.setattr(compact_steps, "SPARSITIES", (0.75,))
    dense, sparse = compact_steps.measure(2, 32, 4, 1)
    masked, values, groups = map(float, sparse[2:5])
    assert groups < values < float(dense[2]) < masked


def test_compact_steps_are_measured_beside_dense_and_masked_ones():
    case = compact.Case("few", 2, lambda: compact.layers(2, 32, 2, True), (0.9, 0.95), 1, 1)
    rows = compact.measure(case)
    assert [row[2] for row in rows] == ["dense", "masked", "compact, 90 %", "compact, 95 %"]
    assert all(float(cell) >= 0 for row in rows for cell in row[3:])
    nbytes = [float(row[3]) for row in rows]
    assert nbytes[3] < nbytes[2] < nbytes[0] < nbytes[1]


def test_deltas_are_measured_beside_plain_compression(tmp_path):
    numbers = [float(cell) for cell in deltas.measure_bytes(20_000, 0.01, tmp_path)[2:]]
    dense, compressed = numbers[:2]
    assert dense == 400
    assert all(number < compressed for number in numbers[2:])
    rows = deltas.measure_times(2_000, 0.01, 1, tmp_path)
    assert rows[0][2] == "1.00"
    assert all(float(cell) >= 0 for row in rows for cell in row[1:])


def test_tuned_formats_are_measured_beside_dense_products():
    product, step, name = compact.measure_tuned(16, 2, 0.5, 4, 1)
    assert min(product, step) > 0
    assert name in ("values", "grouped", "dense")


def test_the_peak_of_compact_is_measured():
    params, masks, result, parameter, peak = compact.measure_peak(2, 64, 0)
    assert (params, masks, parameter) == (2 * 64 * 64 * 4, 2 * 64 * 64, 64 * 64 * 4)
    assert result == 2 * 410 * 8
    assert peak >= 0


def test_moves_are_measured_beside_steps():
    rows = compact_move.measure(compact_move.CASES[2], layers=2, width=32, rounds=2)
    assert [row[2] for row in rows] == ["masked step that moves", "compact step", "compact move"]
    assert rows[1][4] == "1.00"
    assert all(float(cell) > 0 for row in rows for cell in row[3:5])


def test_steps_that_train_a_few_entries_need_less_than_full_training():
    rows = {row[0]: [float(cell) for cell in row[1:]] for row in finetuning.measure(2, 32, 16, 1)}
    assert rows["full"][0] > 4  # two moments in bfloat16
    assert rows["train_only"][0] < 0.3
    assert rows["compact, entries"][1] < rows["full"][1]
