"""Programs that jax traced: their equations, axes, products and constants."""
