"""Containers of parameters that several tests use."""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax


class Pair(NamedTuple):
    kernel: object
    bias: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: object
    bias: object


class Module(eqx.Module):
    kernel: object
    bias: object
