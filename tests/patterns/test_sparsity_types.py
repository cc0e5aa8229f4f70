"""Types are values: checked when they are made, compared by content, read from strings."""

import dataclasses

import numpy as np
import pytest

from sparsity.patterns import parse_nm, register_pattern
from sparsity.sparsity_types import Block, Channel, FanIn, NByM, Unstructured, parse_sparsity_type

NAN = float("nan")
ALL = [Unstructured(), NByM(2, 4), Block((4, 4)), Channel(-1), FanIn(), FanIn(16, (0, 1))]


@pytest.mark.parametrize("kind", ALL, ids=repr)
def test_types_are_frozen_hashable_values(kind):
    twin = dataclasses.replace(kind)
    assert twin == kind
    assert hash(twin) == hash(kind)
    for field in dataclasses.fields(kind):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(kind, field.name, 1)


def test_defaults_are_the_last_axis_and_average_pooling():
    assert NByM(2, 4).axis == -1
    assert Channel().axis == -1
    assert Block((2, 3)).use_avg_pooling is True
    assert (FanIn().group, FanIn().axis) == (1, -2)


def test_a_block_shape_given_as_a_list_compares_like_a_tuple():
    assert Block([2, 3]) == Block((2, 3))
    assert hash(Block([2, 3])) == hash(Block((2, 3)))


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
def test_narrow_integers_of_numpy_do_not_overflow(kind):
    shape = (8, 1200)
    for pattern, twin in [
        (NByM(kind(2), kind(4), kind(1)), NByM(2, 4, 1)),
        (Block((kind(100), kind(2))), Block((100, 2))),
        (FanIn(kind(16)), FanIn(16)),
    ]:
        assert repr(pattern) == repr(twin)
        pattern.check(shape, 0, "w")
        assert pattern.count_kept(shape, 0.5) == twin.count_kept(shape, 0.5) == 4800


def test_axes_of_fan_in_compare_in_any_order_and_one_axis_as_an_integer():
    assert FanIn(4, [2, 0]) == FanIn(4, (0, 2))
    assert hash(FanIn(4, [2, 0])) == hash(FanIn(4, (0, 2)))
    assert FanIn(4, (-2,)) == FanIn(4, -2)


@pytest.mark.parametrize(("n", "m"), [(0, 1), (0, 4), (4, 4), (1, 1), (np.int64(2), np.int32(4))])
def test_n_may_be_anything_from_none_to_all_of_m(n, m):
    kind = NByM(n, m)
    assert (kind.n, kind.m) == (n, m)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NByM(4, 2), r"n = 4, m = 2.*NByM\(2, 4\)"),
        (lambda: NByM(-1, 4), "NByM.n must be at least 0, got NByM.n = -1"),
        (lambda: NByM(0, 0), "NByM.m must be at least 1, got NByM.m = 0"),
        (lambda: NByM(2, -4), "NByM.m must be at least 1, got NByM.m = -4"),
        (lambda: NByM(2.0, 4), "NByM.n must be an integer, got NByM.n = 2.0"),
        (lambda: NByM(2, 4.0), "NByM.m must be an integer, got NByM.m = 4.0"),
        (lambda: NByM(True, 4), "NByM.n must be an integer, got NByM.n = True"),
        (lambda: NByM(NAN, 4), "NByM.n must be an integer, got NByM.n = nan"),
        (lambda: NByM(2, 4, axis=None), "NByM.axis must be an integer, got NByM.axis = None"),
        (lambda: NByM(2, 4, axis=1.0), "NByM.axis must be an integer, got NByM.axis = 1.0"),
        (lambda: Block((0, 4)), "block_shape must be at least 1, got Block.block_shape = 0"),
        (lambda: Block((4, -1)), "block_shape must be at least 1, got Block.block_shape = -1"),
        (lambda: Block((4, 1.5)), "block_shape must be an integer, got Block.block_shape = 1.5"),
        (lambda: Block((4, True)), "block_shape must be an integer, got Block.block_shape = True"),
        (lambda: Block((4,)), r"block_shape must be \(rows, columns\), got block_shape = \(4,\)"),
        (lambda: Block((1, 2, 3)), r"block_shape must be \(rows, columns\).*\(1, 2, 3\)"),
        (lambda: Block(4), "block_shape.*4"),
        (lambda: Channel(None), "Channel.axis must be an integer, got Channel.axis = None"),
        (lambda: Channel(0.5), "Channel.axis must be an integer, got Channel.axis = 0.5"),
        (lambda: Channel(True), "Channel.axis must be an integer, got Channel.axis = True"),
        (lambda: FanIn(0), "FanIn.group must be at least 1, got FanIn.group = 0"),
        (lambda: FanIn(2.0), "FanIn.group must be an integer, got FanIn.group = 2.0"),
        (lambda: FanIn(True), "FanIn.group must be an integer, got FanIn.group = True"),
        (lambda: FanIn(1, None), "FanIn.axis must be an integer, got FanIn.axis = None"),
        (lambda: FanIn(1, "0"), "FanIn.axis must be an integer, got FanIn.axis = '0'"),
        (lambda: FanIn(1, (0, 1.0)), "FanIn.axis must be an integer, got FanIn.axis = 1.0"),
        (lambda: FanIn(1, (0, None)), "FanIn.axis must be an integer, got FanIn.axis = None"),
        (lambda: FanIn(1, (1, 1)), r"FanIn.axis must be different axes.*\(1, 1\)"),
        (lambda: FanIn(1, ()), r"FanIn.axis must be different axes.*\(\)"),
    ],
)
def test_a_bad_value_is_named_when_the_type_is_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("unstructured", Unstructured()),
        ("nm_2,4", NByM(2, 4)),
        ("nm_1,16", NByM(1, 16)),
        ("nm_2,4,-2", NByM(2, 4, axis=-2)),
        ("nm_2,4,0", NByM(2, 4, axis=0)),
        ("nm_2, 4, -2", NByM(2, 4, axis=-2)),
        ("2:4", NByM(2, 4)),
        (" 2 : 4 ", NByM(2, 4)),
        ("10:16", NByM(10, 16)),
        ("block_4,4", Block((4, 4))),
        ("block_1,32", Block((1, 32))),
        (" block_4,8 ", Block((4, 8))),
        ("channel_0", Channel(0)),
        ("channel_-1", Channel(-1)),
        ("fanin_1", FanIn()),
        ("fanin_16", FanIn(16)),
        ("fanin_16,-2", FanIn(16, -2)),
        (" fanin_16, 0 ", FanIn(16, 0)),
        ("fanin_16,0,1", FanIn(16, (0, 1))),
        ("fanin_4,-4,-3,-2", FanIn(4, (-4, -3, -2))),
    ],
)
def test_configuration_strings_are_read(text, kind):
    assert parse_sparsity_type(text) == kind


# fmt: off
UNKNOWN = [
    "", "None", "structured", "unstructured_3",
    "nm", "nm_", "nm_2", "nm_2,4,", "nm_2,4,1,1", "nm_2.0,4", "nm_a,b", "2:4:8", "2:", "-2:4",
    "block_4", "block_4,4,4", "block_4x4", "blok_4,4",
    "channel", "channel_", "channel_x", "channel_0,1",
    "fanin", "fanin_", "fanin_x", "fanin_16,", "fanin_16,(0,1)", "fan_in_16",
]
# fmt: on


UNDERSTOOD = (
    "unstructured",
    "nm_2,4",
    "nm_2,4,-2",
    "2:4",
    "block_4,4",
    "channel_-1",
    "fanin_16,-2",
)


@pytest.mark.parametrize("text", UNKNOWN)
def test_an_unknown_string_is_shown_beside_what_is_known(text):
    with pytest.raises(ValueError, match="Sparsity type") as error:
        parse_sparsity_type(text)
    assert repr(text) in str(error.value)
    for spelling in UNDERSTOOD:
        assert spelling in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nm_4,2", "n = 4, m = 2"),
        ("4:2", "n = 4, m = 2"),
        ("nm_2,0", "NByM.m"),
        ("0:0", "NByM.m"),
        ("nm_-2,4", "NByM.n"),
        ("block_0,4", "block_shape"),
        ("fanin_0", "FanIn.group"),
        ("fanin_1,0,0", "FanIn.axis"),
    ],
)
def test_numbers_in_a_string_are_checked_like_others(text, message):
    with pytest.raises(ValueError, match=message):
        parse_sparsity_type(text)


def test_a_registered_name_stands_for_a_pattern_with_the_numbers_that_its_function_takes():
    for _ in range(2):  # the same function again changes nothing
        register_pattern("tile", tile)
    assert parse_sparsity_type("tile_3") == Block((3, 3))
    with pytest.raises(ValueError, match=r"'tile_3,4' has too many numbers .*'tile_size'"):
        parse_sparsity_type("tile_3,4")
    with pytest.raises(ValueError, match=r"'nm' is taken by <class .*NByM'>; choose another\.$"):
        register_pattern("nm", tile)
    with pytest.raises(ValueError, match="signature"):
        register_pattern("integer", int)
    register_pattern("nothing", lambda: None)
    with pytest.raises(ValueError, match=r"'nothing' of register_pattern must be a pat.*None"):
        parse_sparsity_type("nothing")


@pytest.mark.parametrize("text", ["channel", "nm_2", "block_2", "unstructured_1"])
def test_a_form_with_other_numbers_is_not_called_unknown(text):
    with pytest.raises(ValueError, match=f"^Sparsity type '{text}' has too many numbers or too"):
        parse_sparsity_type(text)


def test_numbers_that_no_axis_has_are_refused_as_text():
    for text in ("nm_1," + "9" * 5000, "1:" + "9" * 5000):
        with pytest.raises(ValueError, match=f"^Sparsity type '{text[:9]}.* is not known"):
            parse_sparsity_type(text)
    with pytest.raises(ValueError, match=r"^pattern = '1:9.* is no pattern"):
        parse_nm("pattern", "1:" + "9" * 5000)


def tile(size):
    return Block((size, size))


@pytest.mark.parametrize("text", [None, 3, (2, 4)])
def test_a_configuration_that_is_no_text_is_an_error(text):
    with pytest.raises(ValueError, match="text must be text such as '2:4', got text = "):
        parse_sparsity_type(text)


@pytest.mark.parametrize("name", ["", "rows_2", "2:4", " rows", 3, None])
def test_a_name_that_no_string_could_have_is_refused(name):
    with pytest.raises(ValueError, match=f"name = {name!r}"):
        register_pattern(name, Block)
