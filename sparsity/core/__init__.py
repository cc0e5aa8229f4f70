"""Arrays and trees; knows nothing of sparsity.

- Trees: `trees.py` matches leaves by path, `owners.py` finds the moments of a parameter in the
  state of an optimizer, and `names.py` reads the paths and names that users write.
- Arrays: `sharding.py` places them, `kernels.py` controls what XLA fuses and how arrays lie in
  memory, and `hashing.py` draws random scores.
- Exact numbers: `exact.py` integers of two words, `exact_sums.py` sums in any order,
  `polynomials.py` costs, and `dtypes.py` the promotion of dtypes.
  packages and tables, and `pictures.py`.
"""
