"""Metadata of the package; `pip install -e '.[dev]'` gives a full working environment."""

from pathlib import Path

from setuptools import find_packages, setup

EXTRAS = {
    "config": ["absl-py>=2.1", "ml_collections>=1.0"],
    "tensorboard": ["tensorboardX>=2.6"],
    "summary": ["matplotlib>=3.10", "rich>=13"],
    "flax": ["flax>=0.12"],
    "examples": ["mlxtend>=0.23", "orbax-checkpoint>=0.11", "tqdm>=4.66"],
    "baselines": ["gymnax>=1.0", "mnist1d>=0.0.2", "six>=1.16"],  # gymnax needs six
    "test": [
        "dm-haiku>=0.0.16",
        "equinox>=0.13",
        "hypothesis>=6.100",
        "ipykernel>=6.29",
        "mypy>=1.15",
        "nbclient>=0.10",
        "nbformat>=5.10",
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "ruff>=0.9",
    ],
}
EXTRAS["examples"] += EXTRAS["config"] + EXTRAS["flax"] + EXTRAS["summary"]
EXTRAS["examples"] += EXTRAS["tensorboard"]
EXTRAS["baselines"] += EXTRAS["examples"]
EXTRAS["dev"] = EXTRAS["baselines"] + EXTRAS["test"]

setup(
    name="sparsity",
    version="0.1.0",
    description="Pruning and sparse training for any optax optimizer, in JAX.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    # The link `algorithms` at the top must not become a package of its own.
    packages=find_packages(include=["sparsity", "sparsity.*"]),
    package_data={"sparsity": ["py.typed"]},
    install_requires=["jax>=0.10", "jaxlib>=0.10", "optax>=0.2.5", "chex>=0.1.89", "numpy>=2.0"],
    extras_require=EXTRAS,
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
