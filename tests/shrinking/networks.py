"""Networks that several tests of this folder cut."""

import functools

import flax.linen as nn

from tests.graph import models

SMALL = models.SMALL | {"vit": functools.partial(models.vit, layers=1)}


class Network(nn.Module):
    """Convolutions with BatchNorm around a residual stream."""

    train: bool = False

    @nn.compact
    def __call__(self, x):
        norm = functools.partial(nn.BatchNorm, use_running_average=not self.train)
        x = nn.relu(norm()(nn.Conv(8, (3, 3), use_bias=False)(x)))
        y = nn.relu(norm()(nn.Conv(16, (3, 3), use_bias=False)(x)))
        x = x + norm()(nn.Conv(8, (3, 3), use_bias=False)(y))
        return nn.Dense(3)(x.mean((1, 2)))
