"""Stored plans: what was written is read again, and what is damaged is refused by leaf and axis."""

import dataclasses
import json

import numpy as np
import pytest

from sparsity.shrinking.plan import Plan

PATH = ["net", "up"]
WHERE = r"net/up"


def text(path=PATH, shape=(3, 4), kept=None, **changes):
    """Returns the text of a plan with one leaf."""
    leaf = {"path": path, "shape": shape, "kept": {"1": [0, 2]} if kept is None else kept}
    return json.dumps({"format": 1, "leaves": [leaf]} | changes)


def test_a_plan_is_read_as_written():
    kept = {
        ("a", "b"): {0: np.array([0, 2]), 1: np.array([[0, 1], [1, 3], [0, 3]])},
        (): {2: np.array([5])},
    }
    plan = Plan(kept, {("a", "b"): (3, 4), (): (1, 1, 6)})
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.shapes == plan.shapes
    for path, axes in kept.items():
        for axis, index in axes.items():
            np.testing.assert_array_equal(again.kept[path][axis], index)
    assert Plan.from_json('{"format": 1, "leaves": []}') == Plan({}, {})


def test_the_fields_of_a_plan_cannot_be_set():
    with pytest.raises(dataclasses.FrozenInstanceError, match="kept"):
        Plan({}, {}).kept = {}


LEAVES = {
    "no index": ({"kept": {"1": []}}, rf"{WHERE}.*axis 1: no index"),
    "no index in a layer": ({"kept": {"1": [[], [], []]}}, rf"{WHERE}.*axis 1: no index"),
    "floats": ({"kept": {"1": [0.0, 2.0]}}, rf"axis 1 of the leaf '{WHERE}'.*0\.0"),
    "NaN": ({"kept": {"1": [float("nan")]}}, rf"axis 1 of the leaf '{WHERE}'.*nan"),
    "booleans": ({"kept": {"1": [False, True]}}, rf"axis 1 of the leaf '{WHERE}'.*False"),
    "strings": ({"kept": {"1": ["0"]}}, rf"axis 1 of the leaf '{WHERE}'"),
    "a number": ({"kept": {"1": 2}}, rf"axis 1 of the leaf '{WHERE}'"),
    "nothing": ({"kept": {"1": None}}, rf"axis 1 of the leaf '{WHERE}'"),
    "negative": ({"kept": {"1": [-1, 2]}}, rf"axis 1 of the leaf '{WHERE}'.*-1"),
    "larger than an int64": ({"kept": {"1": [2**64]}}, rf"axis 1 of the leaf '{WHERE}'"),
    "out of range": ({"kept": {"1": [0, 4]}}, rf"{WHERE}.*axis 1: indices from 0 to 4.*\[0, 4\)"),
    "unsorted": ({"kept": {"1": [2, 0]}}, rf"{WHERE}.*axis 1: indices that do not ascend"),
    "twice": ({"kept": {"1": [2, 2]}}, rf"{WHERE}.*axis 1: indices that do not ascend"),
    "ragged": (
        {"kept": {"1": [[0, 1], [0], [0, 1]]}},
        rf"axis 1 of the leaf '{WHERE}'.*each layer",
    ),
    "too deep": ({"kept": {"1": [[[0]]]}}, rf"axis 1 of the leaf '{WHERE}'"),
    "half nested": ({"kept": {"1": [[0], 1]}}, rf"axis 1 of the leaf '{WHERE}'"),
    "half flat": ({"kept": {"1": [0, [1]]}}, rf"axis 1 of the leaf '{WHERE}'"),
    "too few layers": ({"kept": {"1": [[0], [1]]}}, rf"{WHERE}.*axis 1: 2 rows"),
    "layers of layers": ({"kept": {"0": [[0], [1], [2]]}}, rf"{WHERE}.*axis 0: 3 rows"),
    "unsorted in a layer": ({"kept": {"1": [[0, 1], [1, 0], [0, 1]]}}, rf"{WHERE}.*not ascend"),
    "no such axis": ({"kept": {"2": [0]}}, rf"'{WHERE}'.*no axis '2'"),
    "a negative axis": ({"kept": {"-1": [0]}}, rf"'{WHERE}'.*no axis '-1'"),
    "an axis that is no number": ({"kept": {"01": [0]}}, rf"'{WHERE}'.*no axis '01'"),
    "a list of axes": ({"kept": [[0, 2]]}, rf"'{WHERE}'.*has no axes"),
    "a path of numbers": ({"path": ["net", 1]}, r"path \['net', 1\]"),
    "a joined path": ({"path": "net/up"}, r"path 'net/up'"),
    "a shape of floats": ({"shape": [3, 4.0]}, rf"shape \[3, 4\.0\] of the leaf '{WHERE}'"),
    "a shape of booleans": ({"shape": [True, 4]}, rf"shape \[True, 4\] of the leaf '{WHERE}'"),
    "a negative shape": ({"shape": [-3, 4]}, rf"shape \[-3, 4\] of the leaf '{WHERE}'"),
    "a size": ({"shape": 12}, rf"shape 12 of the leaf '{WHERE}'"),
}
TEXTS = {
    "format 2": (text(format=2), "format is 2, not 1"),
    "format True": (text(format=True), "format is True, not 1"),
    "format 1.0": (text(format=1.0), "format is 1.0, not 1"),
    "no format": ('{"leaves": []}', "format is None, not 1"),
    "no leaves": ('{"format": 1}', "no list of leaves"),
    "leaves by name": (text(leaves={}), "no list of leaves"),
    "leaves that are text": (text(leaves=""), "no list of leaves"),
    "a leaf that is a list": (text(leaves=[[]]), r"the leaf \[\] must have a path"),
    "a leaf without a shape": (
        text(leaves=[{"path": [], "kept": {}}]),
        "must have a path, a shape",
    ),
    "a list": ("[]", "no list of leaves"),
    "cut off": (text()[:-5], "delimiter"),
    "nothing": ("", "Expecting value"),
    "a deep list": ("[" * 100_000, "recursion"),
    "no text": (None, "JSON object must be str"),
    "an axis twice": (
        '{"format": 1, "leaves": [{"path": [], "shape": [4], "kept": {"0": [1], "0": [2]}}]}',
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
        ({1: np.array([0.0])}, {("w",): (3, 4)}, r"'w'.*axis 1.*no array of indices"),
        ({1: [0]}, {("w",): (3, 4)}, r"'w'.*axis 1.*no array of indices"),
        ({1: np.array([0])}, {}, r"no shape of the leaf 'w'"),
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
