"""The command `sparsity`: its arguments, and its errors as exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from sparsity.cli import diff, inspect, prune
from sparsity.core.checkpoints import FORMATS_TEXT
from sparsity.core.extras import escape_controls
from sparsity.version import __version__

# The function of a command, and the arguments of an example.
COMMANDS = {
    "inspect": (inspect.inspect, "checkpoints/100/default --filter '.*kernel' --json"),
    "prune": (prune.prune, "model.safetensors pruned.safetensors --sparsity 0.5 --type nm_2,4"),
    "diff": (diff.diff, "base.safetensors tuned.safetensors --save delta.safetensors"),
    "apply": (diff.apply, "base.safetensors delta.safetensors tuned.safetensors"),
}
NOTES = f"""
formats: {FORMATS_TEXT}
exit codes: 0 = done (diff: no difference), 1 = diff found differences, 2 = an error
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: arguments of the command; by default those of the process.

    Returns:
      The exit code: 0, 1 if `diff` finds differences, 2 after an error, one line on stderr.
    """
    try:
        arguments = _make_parser().parse_args(argv)
        with np.errstate(all="ignore"):  # comparing a signalling NaN warns
            code: int = arguments.run(arguments)
    except Exception as error:  # a user gets a line, whatever a library raises
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"sparsity: error: {escape_controls(message)}", file=sys.stderr)
        return 2
    return code


class _Parser(argparse.ArgumentParser):
    """Parser that raises exceptions for errors, and keeps the lines of its help."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}. See '{self.prog} --help'.")


def _make_parser() -> _Parser:
    examples = {name: f"  sparsity {name} {x[1]}\n" for name, x in COMMANDS.items()}
    parser = _Parser(prog="sparsity", epilog=f"examples:\n{''.join(examples.values())}{NOTES}")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (run, _) in COMMANDS.items():
        about, epilog = run.__doc__, f"example:\n{examples[name]}{NOTES}"
        command = commands.add_parser(name, help=about, description=about, epilog=epilog)
        command.set_defaults(run=run)
        about = "only parameters of this path, or whose path this regular expression matches"
        command.add_argument("--filter", metavar="KEY", help=about)
    add = commands.choices["inspect"].add_argument
    add("path", type=Path, help="the checkpoint")
    add("--json", action="store_true", help="print JSON")
    add = commands.choices["diff"].add_argument
    add("old", type=Path, help="a checkpoint, or a delta alone")
    add("new", type=Path, nargs="?", help="the checkpoint to compare with it")
    add("--save", metavar="DELTA", type=Path, help="write the changes, for 'sparsity apply'")
    add("--json", action="store_true", help="print JSON, with all parameters")
    add = commands.choices["apply"].add_argument
    add("source", metavar="base", type=Path, help="the checkpoint before training")
    add("delta", type=Path, help="a file of sparsity.Delta, or of diff --save")
    add("target", metavar="out", type=Path, help="where the copy is written")
    add("--overwrite", action="store_true", help="replace the file at OUT")
    add = commands.choices["prune"].add_argument
    add("source", metavar="in", type=Path, help="the checkpoint")
    add("target", metavar="out", type=Path, help="where the copy is written")
    add("--overwrite", action="store_true", help="replace the file at OUT")
    add("--sparsity", type=float, required=True, help="fraction of weights to remove, in [0, 1]")
    add("--scope", help="layerwise (default) or global: all parameters share one threshold")
    algorithms = "magnitude by default; a name of an algorithm that prunes without gradients"
    add("--algorithm", metavar="NAME", default="magnitude", help=algorithms)
    types = "nm_2,4,-2, block_4,4, channel_-1 or fanin_16; parameters that do not fit stay dense"
    add("--type", help=types)
    return parser
