"""Lottery tickets: how many weights are left, which, and what they start from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from tests import helpers
from tests.algorithms import oracles


def _trainer(seed):
    """Training by numbers that do not depend on what is trained, within the masks."""
    calls = []

    def train(params, masks):
        calls.append(params)
        drawn = oracles.tree(seed, len(calls))
        return {
            name: jnp.where(masks[name] > 0, drawn[name], 0) if name != "bias" else drawn[name]
            for name in params
        }

    return train, calls


@pytest.mark.slow
def test_masks_and_starts_are_those_of_numpy():
    for seed in oracles.TREES:
        params, later = oracles.tree(seed), oracles.tree(seed, 99)
        train, calls = _trainer(seed)
        tickets = sparsity.lottery_ticket(train, params, 4, rewind_params=later)
        assert len(tickets) == len(calls) == 5
        sizes, n = oracles.wide(params), oracles.total(oracles.wide(params))
        kept = {name: np.ones(w.shape, np.uint8) for name, w in sizes.items()}
        for r, (start, masks, trained) in enumerate(tickets):
            if r:
                last = oracles.wide(tickets[r - 1][2])
                # Below all magnitudes: what is pruned.
                scores = {name: np.where(kept[name], np.abs(w), -1) for name, w in last.items()}
                kept = oracles.together(scores, round(n * 0.8**r))
            oracles.same_masks(masks, kept)
            assert masks["bias"] is None
            origin = later if r else params
            for name, mask in kept.items():
                bits = np.where(mask, origin[name], np.float32(0)).view(np.uint32)
                np.testing.assert_array_equal(np.asarray(start[name]).view(np.uint32), bits)
            np.testing.assert_array_equal(start["bias"], origin["bias"])
            assert trained["a"].shape == params["a"].shape


@pytest.mark.slow
def test_tickets_go_on_after_those_that_are_done():
    params = oracles.tree(0)
    uninterrupted = sparsity.lottery_ticket(_trainer(0)[0], params, 3)
    train, calls = _trainer(0)
    first = sparsity.lottery_ticket(train, params, 1)
    actual = sparsity.lottery_ticket(train, params, 3, done=first)
    assert len(calls) == 4
    jax.tree.map(np.testing.assert_array_equal, actual, uninterrupted)
    again = sparsity.lottery_ticket(train, params, 3, done=actual)
    assert (len(again), len(calls)) == (4, 4)


def test_a_training_that_donates_leaves_params_and_tickets_alone():
    params = helpers.params()
    train = jax.jit(lambda params, masks: jax.tree.map(lambda w: 2 * w, params), donate_argnums=0)
    tickets = sparsity.lottery_ticket(train, params, 2)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, tickets)))


def test_what_is_pruned_never_returns_though_training_makes_it_large():
    params = {"w": jnp.array([[1.0, 2.0, 3.0, 4.0]])}
    train = lambda params, masks: {"w": jnp.where(masks["w"] > 0, params["w"], 99.0)}  # noqa: E731
    tickets = sparsity.lottery_ticket(train, params, 3, rate=0.5)
    assert [np.flatnonzero(masks["w"]).tolist() for _, masks, _ in tickets] == [
        [0, 1, 2, 3], [2, 3], [3], [3],
    ]  # fmt: skip


def test_leaves_of_several_dtypes_are_ranked_together():
    params = {"a": jnp.array([[1.0, 4.0]], jnp.bfloat16), "b": jnp.array([[2.0, 3.0]])}
    tickets = sparsity.lottery_ticket(lambda params, masks: params, params, 1, rate=0.5)
    np.testing.assert_array_equal(tickets[1][1]["a"], [[0, 1]])
    np.testing.assert_array_equal(tickets[1][1]["b"], [[0, 1]])


def test_leaves_of_text_stay_and_params_without_a_matrix_have_nothing_to_prune():
    same = lambda params, masks: params  # noqa: E731
    params = {"w": jnp.array([[1.0, 2.0]]), "name": "relu"}
    assert sparsity.lottery_ticket(same, params, 1, rate=0.5)[1][0]["name"] == "relu"
    for params, masks in (({}, {}), ({"b": jnp.ones(2)}, {"b": None})):
        assert [ticket[1] for ticket in sparsity.lottery_ticket(same, params, 1, 0)] == [masks] * 2


def test_a_rate_of_float32_is_taken_as_it_is():
    # 15 * (1 - float32(0.1)) is 13.49999998, which float32 rounds to 13.5.
    params = {"w": jnp.arange(1.0, 16)[None]}
    tickets = sparsity.lottery_ticket(lambda params, masks: params, params, 1, np.float32(0.1))
    assert tickets[1][1]["w"].sum() == 13


def test_weights_that_are_not_finite_are_named_with_their_round():
    params = {"w": jnp.array([[1.0, 2.0, 3.0, 4.0]]), "b": jnp.array([jnp.inf])}
    bad = params | {"w": params["w"].at[0, 3].set(jnp.nan)}
    same = lambda params, masks: params  # noqa: E731
    with pytest.raises(ValueError, match=r"^params: the weights at 'w' are not all finite"):
        sparsity.lottery_ticket(same, bad, 1)
    with pytest.raises(ValueError, match=r"^rewind_params: the weights at 'w' are not all finite"):
        sparsity.lottery_ticket(same, params, 1, rewind_params=bad)
    diverges = lambda params, masks: bad if masks["w"].all() else params  # noqa: E731
    with pytest.raises(ValueError, match="train_fn returned in round 0: the weights at 'w'"):
        sparsity.lottery_ticket(diverges, params, 1)
    # What is pruned is not ranked.
    train = lambda params, masks: {"b": params["b"], "w": 1 / params["w"]}  # noqa: E731
    masks = sparsity.lottery_ticket(train, params, 2, rate=0.5)[2][1]
    assert masks["w"].tolist() == [[1, 0, 0, 0]]


def test_tickets_of_another_run_are_refused():
    params = {"w": jnp.array([[1.0, 2.0, 3.0, 4.0]])}
    same = lambda params, masks: params  # noqa: E731
    done = sparsity.lottery_ticket(same, params, 2, rate=0.5)
    with pytest.raises(ValueError, match=r"done\[1\] keeps 2 weights, and the rate keeps 3 in ro"):
        sparsity.lottery_ticket(same, params, 3, rate=0.25, done=done)
    with pytest.raises(
        ValueError, match=r"done\[0\]: start must have.*'v\[1, 4\]', got 'w\[1, 4\]'"
    ):
        sparsity.lottery_ticket(same, {"v": params["w"]}, 3, rate=0.5, done=done)
    with pytest.raises(ValueError, match=r"rewind_params must have.*, got 'w\[2, 2\]'"):
        sparsity.lottery_ticket(same, params, 1, rewind_params={"w": jnp.ones((2, 2))})
    assert len(sparsity.lottery_ticket(same, params, 1, rate=0.5, done=done)) == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rounds": True}, "rounds must be an integer, got rounds = True"),
        ({"rounds": 1, "rate": float("nan")}, "rate must be in .* got rate = nan"),
        ({"rounds": -1}, "rounds must be at least 0, got rounds = -1"),
        ({"rounds": 1, "rate": 1.5}, r"rate must be in \[0, 1\].*got rate = 1.5"),
        ({"rounds": 1, "train_fn": lambda params, masks: None}, "got nothing"),
        (
            {"rounds": 1, "train_fn": lambda params, masks: jax.tree.map(jnp.ravel, params)},
            r"the parameters that it got, .*\[\d+, \d+\].*, got .*\[\d+\]",
        ),
    ],
)
def test_arguments_out_of_range_are_errors(arguments, text):
    with pytest.raises(ValueError, match=text):
        sparsity.lottery_ticket(
            **{"train_fn": lambda params, masks: params, "params": helpers.params()} | arguments
        )
