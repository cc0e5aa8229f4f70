"""One-shot runs, which prune and refit a tree or a model block by block, and their reports.

From a call of `oneshot` to its result:

1. `make_task` traces the model: a `PruningTask` says which parameters are pruned, at which
   sparsities, and which statistics pruner and refit need. `BlockPlan` cuts its program into blocks.
2. `Walk` runs the program on all batches, block by block, and stops where a product reads a weight:
   a `ReachedWeight` sums up the inputs.
3. `PruningTask.prune_layer` prunes and refits the weight by these sums, as `prune` does a tree.
4. `ModelWeights` takes the new weight, with which the program continues; at the end of a block
   `BlockRefit` may train its weights, and `RunFolder` writes them.
5. `OutputSums` adds the errors of the model to the report.
"""
