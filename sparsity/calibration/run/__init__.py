"""One-shot runs, which prune and refit a tree or a model layer by layer, and their reports.

From a call of `oneshot` to its result:

1. `make_task` traces the model: a `PruningTask` says which parameters are pruned, at which
   sparsities, and which statistics pruner and refit need.
2. `Lockstep` runs the program on all batches, equation by equation, and stops where a product reads
   a weight: a `ReachedWeight` sums up the inputs.
3. `PruningTask.prune_layer` prunes and refits the weight by these sums, as `prune` does a tree.
4. `ModelWeights` takes the new weight, with which the program continues, and `LayerStore` saves it.
5. Parameters that no run reaches, or all of them, are pruned by their inputs in the present model.
6. `compare_outputs` adds the errors of the model to the report.
"""
