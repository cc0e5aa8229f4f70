"""Stored plans: what was written is read again, and what is damaged is refused by leaf and axis."""

import dataclasses
import json

import numpy as np
import pytest

from sparsity.shrinking.plan import Plan

PATH = ["net", "up"]
WHERE = r"net/up"


def text(path=PATH, shape=(3, 4), kept=None, evidence=None, **changes):
    """Returns the text of a plan with one leaf."""
    kept = {"1": [0, 2]} if kept is None else kept
    leaf = {"path": path, "shape": shape, "kept": kept, "evidence": evidence or {}}
    return json.dumps({"format": 2, "leaves": [leaf]} | changes)


def test_a_plan_is_read_as_written():
    kept = {
        ("a", "b"): {0: np.array([0, 2]), 1: np.array([[0, 1], [1, 3], [0, 3]])},
        (): {2: np.array([5])},
    }
    evidence = {("a", "b"): {0: [np.array([1])], 1: [np.array(x, int) for x in ([3], [], [1, 2])]}}
    plan = Plan(kept, {("a", "b"): (3, 4), (): (1, 1, 6)}, evidence)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.shapes == plan.shapes
    for path, axes in kept.items():
        for axis, index in axes.items():
            np.testing.assert_array_equal(again.kept[path][axis], index)
    rows = [[row.tolist() for row in again.evidence["a", "b"][axis]] for axis in (0, 1)]
    assert rows == [[[1]], [[3], [], [1, 2]]]
    assert again != Plan(kept, plan.shapes)
    assert Plan.from_json('{"format": 2, "leaves": []}') == Plan({}, {})


@pytest.mark.parametrize(
    "rows",
    [
        1, [1], [[1]], [np.array([1.0])], [np.array([True])], [np.array([[1]])], [np.array([-1])],
        [np.array([4])], [np.array([3, 1])], [np.array([1]), np.array([2])], [],
    ],
)  # fmt: skip
def test_evidence_made_by_hand_is_checked(rows):
    with pytest.raises(ValueError, match=r"evidence must have removed indices of axis 1 .*'w'"):
        Plan({("w",): {1: np.array([0])}}, {("w",): (3, 4)}, {("w",): {1: rows}})


def test_the_fields_of_a_plan_cannot_be_set():
    with pytest.raises(dataclasses.FrozenInstanceError, match="kept"):
        Plan({}, {}).kept = {}


LEAVES = {
    "no index": ({"kept": {"1": []}}, rf"{WHERE}.*axis 1: no index"),
    "no index in a layer": ({"kept": {"1": [[], [], []]}}, rf"{WHERE}.*axis 1: no index"),
    "floats": ({"kept": {"1": [0.0, 2.0]}}, rf"axis 1 of the parameter '{WHERE}'.*0\.0"),
    "NaN": ({"kept": {"1": [float("nan")]}}, rf"axis 1 of the parameter '{WHERE}'.*nan"),
    "booleans": ({"kept": {"1": [False, True]}}, rf"axis 1 of the parameter '{WHERE}'.*False"),
    "strings": ({"kept": {"1": ["0"]}}, rf"axis 1 of the parameter '{WHERE}'"),
    "a number": ({"kept": {"1": 2}}, rf"axis 1 of the parameter '{WHERE}'"),
    "nothing": ({"kept": {"1": None}}, rf"axis 1 of the parameter '{WHERE}'"),
    "negative": ({"kept": {"1": [-1, 2]}}, rf"axis 1 of the parameter '{WHERE}'.*-1"),
    "larger than an int64": ({"kept": {"1": [2**64]}}, rf"axis 1 of the parameter '{WHERE}'"),
    "out of range": ({"kept": {"1": [0, 4]}}, rf"{WHERE}.*axis 1: indices from 0 to 4.*\[0, 4\)"),
    "unsorted": ({"kept": {"1": [2, 0]}}, rf"{WHERE}.*axis 1: indices that do not ascend"),
    "twice": ({"kept": {"1": [2, 2]}}, rf"{WHERE}.*axis 1: indices that do not ascend"),
    "ragged": (
        {"kept": {"1": [[0, 1], [0], [0, 1]]}},
        rf"axis 1 of the parameter '{WHERE}'.*each layer",
    ),
    "too deep": ({"kept": {"1": [[[0]]]}}, rf"axis 1 of the parameter '{WHERE}'"),
    "half nested": ({"kept": {"1": [[0], 1]}}, rf"axis 1 of the parameter '{WHERE}'"),
    "half flat": ({"kept": {"1": [0, [1]]}}, rf"axis 1 of the parameter '{WHERE}'"),
    "too few layers": ({"kept": {"1": [[0], [1]]}}, rf"{WHERE}.*axis 1: 2 rows"),
    "layers of layers": ({"kept": {"0": [[0], [1], [2]]}}, rf"{WHERE}.*axis 0: 3 rows"),
    "unsorted in a layer": ({"kept": {"1": [[0, 1], [1, 0], [0, 1]]}}, rf"{WHERE}.*not ascend"),
    "no such axis": ({"kept": {"2": [0]}}, rf"'{WHERE}'.*no axis '2'"),
    "a negative axis": ({"kept": {"-1": [0]}}, rf"'{WHERE}'.*no axis '-1'"),
    "an axis that is no number": ({"kept": {"01": [0]}}, rf"'{WHERE}'.*no axis '01'"),
    "evidence without layers": (
        {"evidence": {"1": [1]}},
        rf"evidence for axis 1 of the parameter '{WHERE}'.*got \[1\]",
    ),
    "evidence of floats": ({"evidence": {"1": [[1.0]]}}, rf"evidence for axis 1 .*'{WHERE}'.*1\.0"),
    "evidence that stays": ({"evidence": {"1": [[1, 2]]}}, rf"evidence .* axis 1 .*'{WHERE}'"),
    "evidence out of range": ({"evidence": {"1": [[1, 4]]}}, rf"evidence .* axis 1 .*'{WHERE}'"),
    "unsorted evidence": ({"evidence": {"1": [[3, 1]]}}, rf"evidence .* axis 1 .*'{WHERE}'"),
    "evidence twice": ({"evidence": {"1": [[1, 1]]}}, rf"evidence .* axis 1 .*'{WHERE}'"),
    "evidence of layers": ({"evidence": {"1": [[1], [3]]}}, rf"evidence .* axis 1 .*'{WHERE}'"),
    "evidence of a complete axis": ({"evidence": {"0": [[1]]}}, rf"evidence .* axis 0 .*'{WHERE}'"),
    "evidence of no axis": ({"evidence": {"2": [[1]]}}, rf"'{WHERE}'.*no axis '2'"),
    "a list of axes": ({"kept": [[0, 2]]}, rf"'{WHERE}'.*has no axes"),
    "a path of numbers": ({"path": ["net", 1]}, r"path \['net', 1\]"),
    "a joined path": ({"path": "net/up"}, r"path 'net/up'"),
    "a shape of floats": ({"shape": [3, 4.0]}, rf"shape \[3, 4\.0\] of the parameter '{WHERE}'"),
    "a shape of booleans": ({"shape": [True, 4]}, rf"shape \[True, 4\] of the parameter '{WHERE}'"),
    "a negative shape": ({"shape": [-3, 4]}, rf"shape \[-3, 4\] of the parameter '{WHERE}'"),
    "a size": ({"shape": 12}, rf"shape 12 of the parameter '{WHERE}'"),
}
TEXTS = {
    "format 1, without evidence": (text(format=1), "format is 1, not 2"),
    "format True": (text(format=True), "format is True, not 2"),
    "format 2.0": (text(format=2.0), "format is 2.0, not 2"),
    "no format": ('{"leaves": []}', "format is None, not 2"),
    "no leaves": ('{"format": 2}', "leaves is not a list"),
    "leaves by name": (text(leaves={}), "leaves is not a list"),
    "leaves that are text": (text(leaves=""), "leaves is not a list"),
    "a leaf that is a list": (text(leaves=[[]]), r"\[\] in leaves must have path"),
    "a leaf without a shape": (
        text(leaves=[{"path": [], "kept": {}, "evidence": {}}]),
        "must have path, shape",
    ),
    "a list": ("[]", "leaves is not a list"),
    "cut off": (text()[:-1], "delimiter"),
    "nothing": ("", "Expecting value"),
    "a deep list": ("[" * 100_000, "(recursion|Stack overflow)"),
    "no text": (None, "JSON object must be str"),
    "an axis twice": (
        text(kept={"0": [1], "2": [2]}).replace('"2"', '"0"'),
        "'0' comes twice",
    ),
    "a leaf twice": (text(leaves=json.loads(text())["leaves"] * 2), r"\('net', 'up'\) comes twice"),
}


@pytest.mark.parametrize(
    ("damaged", "message"),
    [*((text(**changes), message) for changes, message in LEAVES.values()), *TEXTS.values()],
    ids=[*LEAVES, *TEXTS],
)
def test_a_damaged_plan_is_refused(damaged, message):
    with pytest.raises(ValueError, match=f"(?s)^Not a plan written by Plan.to_json.*{message}"):
        Plan.from_json(damaged)


@pytest.mark.parametrize(
    ("axes", "shapes", "message"),
    [
        ({1: np.array([0, 4])}, {("w",): (3, 4)}, r"'w'.*axis 1: indices from 0 to 4"),
        ({-1: np.array([0])}, {("w",): (3, 4)}, r"'w'.*axis -1: there is no such axis"),
        ({True: np.array([0])}, {("w",): (3, 4)}, r"'w'.*axis True: there is no such axis"),
        ({0.5: np.array([0])}, {("w",): (3, 4)}, r"'w'.*axis 0.5: there is no such axis"),
        ({1: np.array([0.0])}, {("w",): (3, 4)}, r"'w'.*axis 1.*not an array of indices"),
        ({1: [0]}, {("w",): (3, 4)}, r"'w'.*axis 1.*not an array of indices"),
        ({1: np.array([0])}, {}, r"no shape of the parameter 'w'"),
    ],
)
def test_a_plan_made_by_hand_is_checked(axes, shapes, message):
    with pytest.raises(ValueError, match=message):
        Plan({("w",): axes}, shapes)


def test_plans_are_composed_in_the_order_of_the_cuts():
    first = Plan({("w",): {1: np.array([1, 3, 5])}}, {("w",): (2, 6)})
    second = Plan({("w",): {1: np.array([0, 2])}}, {("w",): (2, 3)})
    np.testing.assert_array_equal(first.then(second).kept["w",][1], [1, 5])
    with pytest.raises(ValueError, match=r"'w' of shape \(2, 6\), this plan leaves \(2, 2\)"):
        second.then(first)


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        ([1, 3, 5], [[0, 1], [1, 2]], [[1, 3], [3, 5]]),
        ([[0, 1, 2], [3, 4, 5]], [0, 2], [[0, 2], [3, 5]]),
        ([[0, 1, 2], [3, 4, 5]], [[0, 1], [1, 2]], [[0, 1], [4, 5]]),
    ],
)
def test_plans_of_layers_that_keep_different_channels_are_composed_layer_by_layer(
    first, second, both
):
    cuts = [
        Plan({("w",): {1: np.array(x)}}, {("w",): (2, n)}) for x, n in ((first, 6), (second, 3))
    ]
    np.testing.assert_array_equal(cuts[0].then(cuts[1]).kept["w",][1], both)


def test_evidence_is_composed_at_indices_before_the_first_cut():
    def cut(kept, size, *rows):
        evidence = {("w",): {1: [np.array(row) for row in rows]}} if rows else {}
        return Plan({("w",): {1: np.array(kept)}}, {("w",): (2, size)}, evidence)

    def rows(plan):
        return [row.tolist() for row in plan.evidence["w",][1]]

    first, second = cut([1, 3, 5], 6, [2]), cut([0], 3, [2])
    assert rows(first.then(second)) == [[2, 5]]
    assert rows(first.then(cut([0], 3))) == [[2, 3, 5]]
    assert rows(cut([1, 3, 5], 6).then(second)) == [[0, 2, 4, 5]]
    assert rows(Plan({}, {}).then(second)) == rows(second.then(Plan({}, {}))) == [[2]]
    assert not cut([1, 3, 5], 6).then(cut([0], 3)).evidence
    by_layer = cut([[0], [1]], 3, [2], [0, 2])
    assert rows(first.then(by_layer)) == [[2, 5], [1, 2, 5]]
