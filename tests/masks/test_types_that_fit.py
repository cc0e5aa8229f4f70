"""Types that fit a parameter, and errors for those that do not."""

import jax.numpy as jnp
import pytest

from sparsity import masks
from sparsity.sparsity_types import Block, Channel, FanIn, NByM, Unstructured


@pytest.mark.parametrize(
    ("kind", "shape", "batch_axes"),
    [
        (Unstructured(), (), 0),
        (Unstructured(), (3, 5), 1),
        (NByM(2, 4), (3, 8), 0),
        (NByM(2, 4, axis=-2), (8, 3), 0),
        (NByM(2, 4, axis=0), (3, 8, 5), 1),
        (NByM(2, 4), (0,), 0),
        (Block((3, 3)), (7, 7), 0),
        (Block((30, 30)), (7,), 0),
        (Channel(), (3,), 0),
        (Channel(1), (3, 4, 5), 1),
        (Channel(-2), (3, 4, 5), 1),
        (FanIn(), (4, 4), 0),
        (FanIn(16), (4, 4), 0),
        (FanIn(1, 0), (4,), 0),
        (FanIn(2, (0, -1)), (3, 4, 5), 1),
        (FanIn(), (4, 0), 0),
    ],
    ids=str,
)
def test_types_that_fit_pass(kind, shape, batch_axes):
    kind.check(shape, batch_axes, "net/kernel")


@pytest.mark.parametrize(
    ("kind", "shape", "batch_axes", "why"),
    [
        (NByM(2, 4), (3, 6), 0, "axis -1.*6 entries.*m = 4"),
        (NByM(2, 4, axis=0), (6, 4), 0, "axis 0.*6 entries.*m = 4"),
        (NByM(2, 4, axis=-2), (6, 4), 0, "axis -2.*6 entries.*m = 4"),
        (NByM(2, 4, axis=0), (4, 6, 4), 1, "1 leading.*axis.*|axis 0.*6 entries"),
        (NByM(2, 4, axis=-2), (4,), 0, "no axis -2"),
        (NByM(2, 4, axis=2), (4, 4), 0, "no axis 2"),
        (NByM(2, 4), (), 0, "no axis -1"),
        (NByM(2, 4, axis=-2), (4, 4), 1, "1 leading.*no axis -2"),
        (Channel(1), (4,), 0, "no axis 1"),
        (Channel(-3), (4, 4), 0, "no axis -3"),
        (Channel(), (), 0, "no axis -1"),
        (Channel(1), (4, 4), 1, "1 leading.*no axis 1"),
        (FanIn(), (4,), 0, "no axis -2"),
        (FanIn(4, (0, 2)), (4, 4), 0, "no axis 2"),
        (FanIn(4, 1), (4, 4), 1, "1 leading.*no axis 1"),
        (FanIn(4, (0, -2)), (4, 4), 0, "one axis of"),
        (FanIn(4, (0, -2)), (3, 4, 4), 1, "one axis of.*1 leading"),
        (Block((2, 2)), (), 0, "at least one axis"),
        (Block((2, 2)), (4,), 1, "1 leading"),
    ],
    ids=str,
)
def test_types_that_do_not_fit_are_errors_with_parameter_shape_and_remedy(
    kind, shape, batch_axes, why
):
    with pytest.raises(ValueError, match=why) as error:
        kind.check(shape, batch_axes, "net/kernel")
    message = str(error.value)
    for part in (repr(kind), "'net/kernel'", str(shape), "filter_fn", "custom_sparsity_map"):
        assert part in message


@pytest.mark.parametrize("kind", ["nm_2,4", 4, NByM], ids=repr)
def test_what_is_no_type_is_an_error_with_the_parameter(kind):
    table = masks.Sites({"net": {"kernel": jnp.ones((3, 4))}}, lambda path, param: kind)
    with pytest.raises(ValueError, match="Block, Channel, FanIn or another") as error:
        table[next(iter(table))]
    assert repr(kind) in str(error.value)
    assert "'net/kernel'" in str(error.value)
