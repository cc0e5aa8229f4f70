"""Lets dopamine-rl 4.1.2 be imported beside today's jax; import this before dopamine.

Two modules that dopamine imports without need for an agent of CartPole are replaced by empty ones:
- `baselines`, that of OpenAI, wraps Atari games; dopamine does not name it among its requirements.
- `tensorflow_probability.substrates.jax` draws the actions of PPO and SAC; its release 0.25 needs
  names that jax has removed.
"""

import sys
from unittest import mock

for name in ("baselines.common", "tensorflow_probability.substrates"):
    package, _, _ = name.partition(".")
    sys.modules[package] = sys.modules[name] = mock.MagicMock()
