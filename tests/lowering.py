"""Makes the lowering of many small programs cheap."""

import threading

from jax._src.interpreters import mlir  # no public name says how contexts are made
from jax._src.lib.mlir import ir

_PROGRAMS_PER_CONTEXT = 100  # a context keeps the types and constants of all its programs


def _is_lowering():
    """Returns whether the thread is in the middle of another program."""
    try:
        return ir.Context.current is not None
    except ValueError:
        return False


def share_contexts():
    """Lets programs that the main thread lowers one after the other share an MLIR context.

    JAX makes a context for each program and loads all dialects there, which takes longer than the
    lowering of a small program. The lowered program does not depend on the context. A program that
    is lowered inside another gets a context of its own: its copies, from which JAX makes the key of
    the cache, would else land in the outer program.
    """
    make, contexts = getattr(mlir, "make_ir_context", None), []
    if make is None:  # another version of jax: the tests take longer
        return

    def get_context():
        if _is_lowering() or threading.current_thread() is not threading.main_thread():
            return make()
        if len(contexts) == _PROGRAMS_PER_CONTEXT:
            contexts.clear()
        contexts.append(contexts[-1] if contexts else make())
        return contexts[-1]

    mlir.make_ir_context = get_context
