"""Dopamine's DQN agent learns CartPole with four of five weights missing from the first step."""

from __future__ import annotations

import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # dopamine logs with TensorFlow

import compat  # noqa: F401 - before dopamine
import gin
import numpy as np
from absl import logging
from dopamine.discrete_domains import run_experiment
from dopamine.jax.agents.dqn import dqn_agent

import sparsity

HERE = Path(__file__).parent
LOWEST_RETURN = 100  # steps for which the pole stays up; an untrained agent manages about 20


@gin.configurable
class SparseDQNAgent(dqn_agent.JaxDQNAgent):
    """The agent with a sparse optimizer; its settings, too, are those of cartpole.gin."""

    def __init__(self, *args: Any, sparsity_config: dict[str, Any], **kwargs: Any) -> None:
        self.pruner = sparsity.create_updater_from_config(sparsity_config)
        super().__init__(*args, **kwargs)

    def _build_networks_and_optimizer(self) -> None:
        super()._build_networks_and_optimizer()
        self.optimizer = self.pruner.wrap_optax(self.optimizer)
        start = self.pruner.init(self.optimizer, self.online_params)
        self.online_params, self.optimizer_state = start


def create_agent(session: None, environment: Any, summary_writer: str) -> SparseDQNAgent:
    del session, summary_writer  # of TensorFlow
    return SparseDQNAgent(num_actions=environment.action_space.n)


def main() -> None:
    """Arguments are gin bindings: 'Runner.num_iterations = 5'."""
    logging.set_verbosity(logging.ERROR)
    gin.parse_config_files_and_bindings([str(HERE / "cartpole.gin")], sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:  # of logs and checkpoints
        runner = run_experiment.Runner(folder, create_agent)
        runner.run_experiment()
    iterations = runner._logger.data.values()
    check(runner._agent, [iteration["eval_average_return"][0] for iteration in iterations])


def check(agent: SparseDQNAgent, returns: list[float]) -> None:
    """Prints what was reached; ends the program if it is not what it should be."""
    layers = sparsity.reports.layer_summary(
        agent.online_params, agent.optimizer_state, agent.pruner
    )
    for layer in layers:
        if layer.target is not None:
            print(f"{layer.path:26} target {layer.target:.4f} zeros {layer.achieved:.4f}")
            wrong = abs(layer.achieved - layer.target) * math.prod(layer.shape)
            if wrong > 0.51:  # a mask keeps a whole number of weights; float32 rounds the target
                sys.exit(f"error: {layer.path} has {wrong:.0f} wrong zeros")
    print("average return of the evaluations:", *(f"{value:.0f}" for value in returns))
    if np.mean(returns[-5:]) < LOWEST_RETURN:
        sys.exit(f"error: the last five should be at least {LOWEST_RETURN} on average")


if __name__ == "__main__":
    main()
