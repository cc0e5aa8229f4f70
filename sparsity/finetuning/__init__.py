"""Fine-tuning of a few entries of a model.

- `train_only.py` trains the entries that masks keep.
- `delta.py` holds `Delta`, the changes from a base model to a tuned one, and its file.
"""
