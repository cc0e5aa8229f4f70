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
        # Two layers of three stay, with two entries each.
        ("a", "b"): {0: np.array([0, 2]), 1: np.array([[0, 1], [1, 3]])},
        (): {2: np.array([5])},
    }
    evidence = {("a", "b"): {0: [np.array([1])], 1: [np.array(x, int) for x in ([3], [])]}}
    plan = Plan(kept, {("a", "b"): (3, 4), (): (1, 1, 6)}, evidence)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.shapes == plan.shapes
    for path, axes in kept.items():
        for axis, index in axes.items():
            np.testing.assert_array_equal(again.kept[path][axis], index)
    rows = [[row.tolist() for row in again.evidence["a", "b"][axis]] for axis in (0, 1)]
    assert rows == [[[1]], [[3], []]]
    assert again != Plan(kept, plan.shapes)
    assert Plan.from_json('{"format": 2, "leaves": []}') == Plan({}, {})


@pytest.mark.parametrize("rows", [1, [np.array([1]), np.array([2])], []])
def test_evidence_made_by_hand_has_a_row_for_each_row_of_indices(rows):
    with pytest.raises(ValueError, match=r"'w'.*axis 1: evidence must have a row"):
        Plan({("w",): {1: np.array([0])}}, {("w",): (3, 4)}, {("w",): {1: rows}})


def test_the_fields_of_a_plan_cannot_be_set():
    with pytest.raises(dataclasses.FrozenInstanceError, match="kept"):
        Plan({}, {}).kept = {}


AXIS = rf"'{WHERE}'.*axis 1: "
NO_INDICES = AXIS + "array.*not an array of indices"
NOT_ASCENDING = AXIS + r"indices that do not ascend within \[0, 4\)"
NO_EVIDENCE = AXIS + "evidence must have a row for each row of the indices"
DAMAGED = {
    "floats": (text(kept={"1": [0.0, 2.0]}), NO_INDICES),
    "NaN": (text(kept={"1": [float("nan")]}), NO_INDICES),
    "booleans": (text(kept={"1": [False, True]}), NO_INDICES),
    "strings": (text(kept={"1": ["0"]}), NO_INDICES),
    "a number": (text(kept={"1": 2}), NO_INDICES),
    "nothing": (text(kept={"1": None}), NO_INDICES),
    "larger than an int64": (text(kept={"1": [2**64]}), NO_INDICES),
    "too deep": (text(kept={"1": [[[0]]]}), NO_INDICES),
    "negative": (text(kept={"1": [-1, 2]}), NOT_ASCENDING),
    "out of range": (text(kept={"1": [0, 4]}), NOT_ASCENDING),
    "unsorted": (text(kept={"1": [2, 0]}), NOT_ASCENDING),
    "twice": (text(kept={"1": [2, 2]}), NOT_ASCENDING),
    "unsorted in a layer": (text(kept={"1": [[0, 1], [1, 0], [0, 1]]}), NOT_ASCENDING),
    "ragged": (text(kept={"1": [[0, 1], [0], [0, 1]]}), "inhomogeneous"),
    "half nested": (text(kept={"1": [[0], 1]}), "inhomogeneous"),
    "too few layers": (text(kept={"1": [[0], [1]]}), AXIS + "2 rows"),
    "layers of layers": (text(kept={"0": [[0], [1], [2]]}), "axis 0: 3 rows"),
    "no such axis": (text(kept={"2": [0]}), "axis 2: there is no such axis"),
    "a negative axis": (text(kept={"-1": [0]}), "axis -1: there is no such axis"),
    "a list of axes": (text(kept=[[0, 2]]), ""),
    "evidence of layers": (text(evidence={"1": [[1], [3]]}), NO_EVIDENCE),
    "a size": (text(shape=12), ""),
    "format 1, without evidence": (text(format=1), "format is 1, not 2"),
    "no format": ('{"leaves": []}', "format"),
    "no leaves": ('{"format": 2}', "leaves"),
    "a leaf that is a list": (text(leaves=[[]]), ""),
    "a leaf without a shape": (text(leaves=[{"path": [], "kept": {}, "evidence": {}}]), "shape"),
    "a list": ("[]", ""),
    "cut off": (text()[:-1], "delimiter"),
    "nothing at all": ("", "Expecting value"),
    "a deep list": ("[" * 100_000, "(recursion|Stack overflow)"),
    "no text": (None, "JSON object must be str"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_plan_is_refused(name):
    damaged, message = DAMAGED[name]
    with pytest.raises(ValueError, match=f"(?s)^Not a plan written by Plan.to_json.*{message}"):
        Plan.from_json(damaged)


@pytest.mark.parametrize(
    ("axes", "shapes", "message"),
    [
        ({1: np.array([0, 4])}, {("w",): (3, 4)}, r"'w'.*axis 1: indices that do not ascend"),
        ({-1: np.array([0])}, {("w",): (3, 4)}, r"'w'.*axis -1: there is no such axis"),
        ({True: np.array([0])}, {("w",): (3, 4)}, r"'w'.*axis True: there is no such axis"),
        ({0.5: np.array([0])}, {("w",): (3, 4)}, r"'w'.*axis 0.5: there is no such axis"),
        ({1: np.array([0.0])}, {("w",): (3, 4)}, r"'w'.*axis 1.*not an array of indices"),
        ({1: [0]}, {("w",): (3, 4)}, r"'w'.*axis 1.*not an array of indices"),
        ({1: np.array([0])}, {}, r"'w', shape None, along axis 1: there is no such axis"),
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
