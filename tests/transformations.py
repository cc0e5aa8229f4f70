"""Every public transformation of the installed optax and of its `contrib`, by name.

They are found by listing, so that a new release is covered: a name that `build` cannot build fails
with that name.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import optax

KERNEL = {"kernel": True, "bias": False}
_LABELS = {"kernel": "a", "bias": "b"}
_MUON = {"kernel": optax.contrib.MuonDimensionNumbers(), "bias": optax.MaskedNode()}
ADAM = functools.partial(optax.adam, 0.1)

# What a transformation needs beside a learning rate; others need nothing or that alone.
_ARGUMENTS = {
    "MultiSteps": lambda make: make(ADAM(), 2).gradient_transformation(),
    "adaptive_grad_clip": lambda make: make(0.1),
    "add_noise": lambda make: make(0.01, 0.5, key=0),
    "apply_if_finite": lambda make: make(ADAM(), 3),
    "chain": lambda make: make(optax.clip(1.0), ADAM()),
    "clip": lambda make: make(0.5),
    "clip_by_block_rms": lambda make: make(0.5),
    "clip_by_global_norm": lambda make: make(0.5),
    "conditionally_mask": lambda make: make(ADAM(), lambda step: step < 3),
    "conditionally_transform": lambda make: make(ADAM(), lambda step: step < 3),
    "differentially_private_aggregate": lambda make: make(1.0, 0.1, key=0),
    "dpsgd": lambda make: make(0.1, 1.0, 0.1, 0),
    "ema": lambda make: make(0.9),
    "flatten": lambda make: make(ADAM()),
    "freeze": lambda make: make({"kernel": False, "bias": True}),
    "inject_hyperparams": lambda make: make(optax.adam)(0.1),
    "inject_stateful_hyperparams": lambda make: make(optax.adam)(0.1),
    "lbfgs": lambda make: make(linesearch=optax.scale_by_zoom_linesearch(3)),
    "lookahead": lambda make: make(ADAM(), 2, 0.5),
    "masked": lambda make: make(ADAM(), KERNEL),
    "measure_with_ema": lambda make: make(optax.global_norm, 0.9),
    "mechanize": lambda make: make(ADAM()),
    "monitor": lambda make: make({"norm": optax.measure_with_ema(optax.global_norm, 0.9)}),
    "multi_transform": lambda make: make({"a": ADAM(), "b": optax.sgd(0.1)}, _LABELS),
    "named_chain": lambda make: make(("clip", optax.clip(1.0)), ("adam", ADAM())),
    "partition": lambda make: make({"a": ADAM(), "b": optax.sgd(0.1)}, _LABELS),
    "sam": lambda make: make(optax.sgd(0.1), optax.sgd(0.05)),
    "scale": lambda make: make(0.1),
    "scale_by_backtracking_linesearch": lambda make: make(3),
    "scale_by_learning_rate": lambda make: make(0.1),
    "scale_by_muon": lambda make: optax.masked(make(weight_dimension_numbers=_MUON), KERNEL),
    "scale_by_schedule": lambda make: make(optax.linear_schedule(0.1, 0.0, 5)),
    "scale_by_zoom_linesearch": lambda make: make(3),
    "schedule_free": lambda make: make(ADAM(), 0.1),
    "selective_transform": lambda make: make(ADAM(), freeze_mask={"kernel": False, "bias": True}),
    "snapshot": lambda make: make("norm", optax.global_norm),
    "split_real_and_imaginary": lambda make: make(ADAM()),
    "stateless": lambda make: make(lambda updates, params: jax.tree.map(jnp.negative, updates)),
    "stateless_with_tree_map": lambda make: make(lambda update, param: -0.1 * update),
    "trace": lambda make: make(0.9),
    "with_extra_args_support": lambda make: make(ADAM()),
}


def build(name):
    make = PUBLIC[name]
    if name in _ARGUMENTS:
        return _ARGUMENTS[name](make)
    parameters = inspect.signature(make).parameters.values()
    needed = {p.name for p in parameters if p.default is p.empty and p.kind not in (2, 4)}
    return make(**dict.fromkeys(needed & {"learning_rate"}, 0.1))


def _returns_transformation(name, make):
    if inspect.isclass(make):
        return hasattr(make, "gradient_transformation")
    if name.startswith("_") or not inspect.isfunction(make):
        return False
    annotation = inspect.signature(make).return_annotation
    if annotation is not inspect.Signature.empty:
        return "GradientTransformation" in str(annotation)
    try:  # some have no annotation
        return name in _ARGUMENTS or isinstance(make(), optax.GradientTransformation)
    except TypeError:
        return False


PUBLIC = {
    name: make
    for module in (optax, optax.contrib)
    for name, make in sorted(vars(module).items())
    if _returns_transformation(name, make)
}
