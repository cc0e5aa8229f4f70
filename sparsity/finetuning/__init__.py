"""Fine-tuning of a few entries of a model.

- `train_only.py` trains the entries that masks keep.
- `delta.py` holds `Delta`, the changes from a base model to a tuned one.
- `entries.py` finds, stores and puts back the changed entries of a parameter.
- `gaps.py` codes their positions, and `delta_file.py` reads and writes files.
"""
