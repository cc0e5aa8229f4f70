"""Channels that are removed together: coupled axes, groups of channels, and cuts."""
