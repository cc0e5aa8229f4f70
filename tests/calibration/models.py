"""Models whose channels several test modules prune."""

import flax.linen as nn


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(6, (3, 3), padding="VALID")(x))
        x = nn.relu(nn.Conv(8, (2, 2), padding="VALID")(x)).mean((1, 2))
        return nn.Dense(3)(x)
