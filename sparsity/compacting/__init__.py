"""Models whose masked parameters are stored, multiplied and trained as their kept values."""
