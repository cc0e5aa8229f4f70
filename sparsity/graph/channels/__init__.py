"""Channels that are removed together: coupled axes, groups of channels, and cuts.

- `coupling.py` unifies the axes of a program that lose entries together, and pins others.
- `groups.py` lists the channels of parameters that follow, and the axes that have none.
- `cuts.py` finds the kept entries, or the sizes, of all axes from those of parameters.
"""
