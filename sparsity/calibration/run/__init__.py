"""One-shot runs, which prune and refit a tree or a model layer by layer, and their reports."""
