"""Readers of parameters: which products read a parameter, along which of its axes?

- `views.py` says which axes of an array hold entries of a parameter.
- `uses.py` follows views through a program to products and lookups.
- `biases.py` finds the parameter that shifts the outputs of a weight.
- `patterns.py` makes filters and patterns from uses: `graph.is_weight`, `nm`, `fan_in`.
"""
