"""Sets the environment of programs that compile for tests; is imported before jax."""

import os
from importlib import metadata
from pathlib import Path

# Most of the time of the tests is the compiler's. The optimized HLO does not depend on these flags.
# XLA ends a program that names a flag it does not have: other emitters went with jax 0.11.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 "
    + (
        # On a busy machine, a thread of a collective may wait longer than 40 s for the last one.
        "--xla_cpu_collective_call_terminate_timeout_seconds=600 "
        "--xla_cpu_use_fusion_emitters=false "
        if metadata.version("jaxlib").startswith(("0.8.", "0.9.", "0.10."))
        else ""
    )
    + "--xla_cpu_parallel_codegen_split_count=1 "  # a program in one part, not one for each thread
    + os.environ.get("XLA_FLAGS", "")
)
# What is compiled is kept for the next run, for all workers and programs that tests start;
# `pytest --cache-clear` empties the folder. To store the smallest program takes 1 ms, to read it
# spares 7 ms: every program is kept.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parents[1] / ".pytest_cache/d/jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# Lowered programs do not say where each operation stands in the source.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
