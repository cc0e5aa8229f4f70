"""Lets fedjax 0.0.17 run with today's jax; import this before fedjax."""

import jax

jax.tree_map = jax.tree.map  # jax has dropped the short name, which fedjax calls at run time
