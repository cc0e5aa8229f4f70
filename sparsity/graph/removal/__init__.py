"""Proofs that removing channels of a model gives the same results as masking them.

- `removable.py` asks for the proofs and keeps their results: `Removal`.
- `proof.py` follows the constants at masked entries through a program, up to each reduction.
- `constants.py` describes these constants.
- `shared_entries.py` finds entries that are equal in all removed channels, though not constant.
"""
