"""Programs that tests run in processes of their own, which see other devices than the tests do.

`python -m tests.scripts NAME KIND [CASE ...]` runs the cases of a program on meshes of eight
virtual devices, whose axes are of a kind, "Auto" or "Explicit"; `tests.eight_devices` does so for
tests.
"""
