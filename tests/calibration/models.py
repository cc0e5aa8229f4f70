"""Models whose channels several test modules prune, and values drawn without a compilation."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def draw(seed, *shape):
    return jnp.asarray(normal(seed, *shape))


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(6, (3, 3), padding="VALID")(x))
        x = nn.relu(nn.Conv(8, (2, 2), padding="VALID")(x)).mean((1, 2))
        return nn.Dense(3)(x)


def conv_net(x):
    """A convolutional network: the function, parameters of weights that are drawn, inputs."""
    shapes = jax.eval_shape(ConvNet().init, jax.random.key(0), x)
    leaves, structure = jax.tree.flatten(shapes)
    drawn = [
        jnp.asarray(normal(i, *leaf.shape) / np.float32(np.sqrt(leaf.size / leaf.shape[-1])))
        for i, leaf in enumerate(leaves)
    ]
    return ConvNet().apply, jax.tree.unflatten(structure, drawn), x
