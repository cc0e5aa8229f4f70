"""Runs of the main job within a test."""

from examples.mnist import config as config_lib
from examples.mnist import train


def run_in(folder, config):
    run = train.prepare(config_lib.Options(config, None, folder, False, False))
    end = train.fit(*run)
    run.checkpoints.close()
    return run, end
