"""PPO on gymnax's CartPole-v1: environments, networks and updates in one compiled program.

Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms".
"""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

import sparsity
from baselines import training

ENVS, HORIZON, ROUNDS, EPOCHS, MINIBATCHES = 8, 64, 200, 4, 4
STEPS = ROUNDS * EPOCHS * MINIBATCHES  # updates of the optimizer
LEARNING_RATE, DISCOUNT, TRACE, CLIP, ENTROPY = 1e-3, 0.99, 0.95, 0.2, 0.01
MAX_NORM, WIDTH = 0.5, 32
TEST_ENVS, TEST_STEPS = 32, 500


def init(key: jax.Array) -> chex.ArrayTree:
    keys = iter(jax.random.split(key, 6))

    def layers(outputs: int, gain: float) -> chex.ArrayTree:
        return [
            training.dense(next(keys), 4, WIDTH),
            training.dense(next(keys), WIDTH, WIDTH),
            training.dense(next(keys), WIDTH, outputs, gain=gain),
        ]

    return {"policy": layers(2, 1e-4), "value": layers(1, 1.0)}


def network(layers: chex.ArrayTree, x: jax.Array) -> jax.Array:
    for layer in layers[:-1]:
        x = jnp.tanh(training.apply_dense(layer, x))
    return training.apply_dense(layers[-1], x)


def log_prob(logits: jax.Array, action: jax.Array) -> jax.Array:
    return -optax.softmax_cross_entropy_with_integer_labels(logits, action)


def advantages(batch: dict[str, jax.Array], last_value: jax.Array) -> jax.Array:
    """Generalized advantage estimates [HORIZON, ENVS]."""

    def back(carry: Any, row: dict[str, jax.Array]) -> Any:
        advantage, value = carry
        goes_on = 1.0 - row["done"]
        delta = row["reward"] + DISCOUNT * value * goes_on - row["value"]
        advantage = delta + DISCOUNT * TRACE * goes_on * advantage
        return (advantage, row["value"]), advantage

    return jax.lax.scan(back, (jnp.zeros(ENVS), last_value), batch, reverse=True)[1]


def loss(params: chex.ArrayTree, batch: dict[str, jax.Array]) -> jax.Array:
    """The clipped objective, the error of the values and the bonus of the entropy."""
    logits = network(params["policy"], batch["observation"])
    value = network(params["value"], batch["observation"])[..., 0]
    ratio = jnp.exp(log_prob(logits, batch["action"]) - batch["log_prob"])
    gain = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
    objective = jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * gain).mean()
    error = 0.5 * jnp.mean((value - batch["advantage"] - batch["value"]) ** 2)
    entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1).mean()
    return -objective + 0.5 * error - ENTROPY * entropy


def train(key: jax.Array, updater: sparsity.BaseUpdater) -> training.Metrics:
    from gymnax import make

    env, env_params = make("CartPole-v1")
    reset = jax.vmap(env.reset, in_axes=(0, None))
    env_step = jax.vmap(env.step, in_axes=(0, 0, 0, None))
    optimizer = optax.chain(
        optax.clip_by_global_norm(MAX_NORM),
        optax.adam(optax.linear_schedule(LEARNING_RATE, 0, STEPS)),
    )
    tx = updater.wrap_optax(optimizer)

    def act(used: chex.ArrayTree, observation: jax.Array, state: Any, key: jax.Array) -> Any:
        """One step of all environments; `used` are the parameters of the sparse network."""
        action_key, env_key = jax.random.split(key)
        logits = network(used["policy"], observation)
        action = jax.random.categorical(action_key, logits)
        env_keys = jax.random.split(env_key, len(observation))
        after, state, reward, ended, cut, _ = env_step(env_keys, state, action, env_params)
        row = {
            "observation": observation,
            "action": action,
            "log_prob": log_prob(logits, action),
            "value": network(used["value"], observation)[..., 0],
            "reward": reward,
            "done": (ended | cut).astype(jnp.float32),
        }
        return (after, state), row

    def update(carry: Any, batch: dict[str, jax.Array]) -> tuple[Any, None]:
        params, opt_state = carry
        grads = jax.grad(lambda p: loss(updater.pre_forward_update(p, opt_state), batch))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (updater.post_gradient_update(params, opt_state), opt_state), None

    def round_of(carry: Any, key: jax.Array) -> tuple[Any, None]:
        params, opt_state, observation, env_state = carry
        act_key, shuffle_key = jax.random.split(key)
        used = updater.pre_forward_update(params, opt_state)
        (observation, env_state), batch = jax.lax.scan(
            lambda now, key: act(used, *now, key),
            (observation, env_state),
            jax.random.split(act_key, HORIZON),
        )
        last_value = network(used["value"], observation)[..., 0]
        batch["advantage"] = advantages(batch, last_value)
        batch = jax.tree.map(lambda x: x.reshape(HORIZON * ENVS, *x.shape[2:]), batch)
        orders = [
            jax.random.permutation(k, HORIZON * ENVS) for k in jax.random.split(shuffle_key, EPOCHS)
        ]
        order = jnp.concatenate(orders).reshape(EPOCHS * MINIBATCHES, -1)
        minibatches = jax.tree.map(lambda x: x[order], batch)
        (params, opt_state), _ = jax.lax.scan(update, (params, opt_state), minibatches)
        return (params, opt_state, observation, env_state), None

    init_key, reset_key, key, test_reset_key, test_key = jax.random.split(key, 5)
    params = init(init_key)
    start = reset(jax.random.split(reset_key, ENVS), env_params)
    carry = (params, tx.init(params), *start)
    (params, opt_state, *_), _ = jax.lax.scan(round_of, carry, jax.random.split(key, ROUNDS))

    used = updater.pre_forward_update(params, opt_state)
    start = reset(jax.random.split(test_reset_key, TEST_ENVS), env_params)
    test_keys = jax.random.split(test_key, TEST_STEPS)
    _, rows = jax.lax.scan(lambda now, key: act(used, *now, key), start, test_keys)
    first = jnp.cumsum(rows["done"], 0) - rows["done"] == 0  # the first episode of each
    returns = jnp.sum(rows["reward"] * first, 0).mean()
    return {"metric": returns, "sparsity": training.sparsity_of(used)}


TASK = training.Task(
    name="cartpole_ppo",
    title="PPO on CartPole",
    metric="return of an episode, at most 500",
    higher_is_better=True,
    sparsities=(0.8,),
    seeds=10,
    settings={
        "environments": ENVS,
        "horizon": HORIZON,
        "rounds": ROUNDS,
        "epochs": EPOCHS,
        "minibatches": MINIBATCHES,
        "steps": STEPS,
        "adam": LEARNING_RATE,
        "max_norm": MAX_NORM,
        "discount": DISCOUNT,
        "trace": TRACE,
        "clip": CLIP,
        "entropy": ENTROPY,
        "width": WIDTH,
        "test_environments": TEST_ENVS,
    },
    train=train,
    has_loss=False,  # each round has data and a loss of its own
)
