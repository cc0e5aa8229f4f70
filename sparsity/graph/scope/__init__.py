"""The scope `Coupled`: channels compete with all their entries, as they lie in a tree.

- `coupled.py` holds the scope: the groups, the numbers of channels that stay, and their masks.
- `placed.py` computes the importance of the channels of a tree, and spreads masks over members.
"""
