"""Channels that go together: coupled axes, groups of channels, and cuts of some of them."""
