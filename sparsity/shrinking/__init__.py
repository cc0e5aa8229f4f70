"""Models that become smaller: masked channels removed for real."""
