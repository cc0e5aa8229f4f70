"""Arrays and trees; knows nothing of sparsity."""
