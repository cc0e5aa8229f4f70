"""`sparsity apply` writes a copy of a checkpoint with the entries of a delta."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from sparsity.cli import checkpoints
from sparsity.finetuning.delta import Delta

ABOUT = "Write a copy of a checkpoint with the changes of a delta."
EXAMPLES = """\
  sparsity apply base.safetensors delta.safetensors tuned.safetensors
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("source", metavar="base", type=Path, help="the checkpoint before training")
    parser.add_argument("delta", type=Path, help="a file of sparsity.Delta, or of diff --save")
    parser.add_argument("target", metavar="out", type=Path, help="where the copy is written")
    parser.add_argument("--overwrite", action="store_true", help="replace the checkpoint at OUT")


def run(arguments: argparse.Namespace) -> int:
    """Writes a copy with the changes of a delta and prints how many parameters changed."""
    checkpoints.check_target(arguments.source, arguments.target, arguments.overwrite)
    if arguments.target.resolve() == arguments.delta.resolve():
        raise ValueError(f"{arguments.target} is the delta. Give another path.")
    delta = Delta.load(arguments.delta)
    delta = dataclasses.replace(delta, base=checkpoints.filter_names(delta.base, arguments.filter))
    params = {name: load() for name, load in checkpoints.read_by_name(arguments.source).items()}
    applied = delta.apply(params)
    names = {name for term in delta.terms for name in term.entries if name in delta.base}
    checkpoints.write(arguments.source, arguments.target, {name: applied[name] for name in names})
    print(f"{len(names)} of {len(params)} parameters changed.")
    return 0
