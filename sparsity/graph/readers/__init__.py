"""Readers of parameters: views, the products that use them, and the biases behind these."""
