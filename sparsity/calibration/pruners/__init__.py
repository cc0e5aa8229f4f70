"""One-shot pruners, which remove weights by statistics of their inputs."""
