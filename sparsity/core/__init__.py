"""Arrays and trees, without sparsity.

- Trees: `trees.py` names and matches leaves by path, `owners.py` assigns the leaves of an optimizer
  state to parameters, and `names.py` reads the names and keys that users write.
- Arrays: `sharding.py` places them, `arrays.py` has dtypes, sums and layouts, and `hashing.py`
  draws random scores.
- Doors: `checks.py` of arguments, and `extras.py` for optional packages, tables, plots and files.
"""
