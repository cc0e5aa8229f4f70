"""Programs that jax traced: their equations, axes, products and constants.

`read_jaxpr` returns a `Program` of equations between values; a `Flow` follows facts through a
program, an `Interpreter` runs one on arrays. What is known of a primitive is one entry: in
`ENTRYWISE`, `REDUCTIONS` or `SOURCES` of `entrywise.py`, in `LAYOUTS` of `layout.py`, or in
`PRODUCTS` of `products.py`. A primitive without an entry needs all entries of its arrays.
`optimizers.py` proves by its program that an optimizer works entry by entry.
"""
