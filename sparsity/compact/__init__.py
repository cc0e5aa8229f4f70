"""Models whose parameters are their kept values."""
