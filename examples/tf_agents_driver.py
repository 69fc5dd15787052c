"""A REINFORCE agent of TF-Agents learns CartPole on a batch of envfleet.

python examples/tf_agents_driver.py

Its drivers, replay buffer and metrics run over the batch as they do over TF-Agents' own
`ParallelPyEnvironment`. The environments are Gymnasium's, so that no actor has to import
TensorFlow; those of `suite_gym` work as well.
"""

import gymnasium
import tensorflow as tf
from tf_agents.agents.reinforce import reinforce_agent
from tf_agents.drivers import dynamic_episode_driver
from tf_agents.environments import tf_py_environment
from tf_agents.metrics import tf_metrics
from tf_agents.networks import actor_distribution_network
from tf_agents.replay_buffers import tf_uniform_replay_buffer
from tf_agents.utils import common

from envfleet.interop import tf_agents as parallel_py_environment

NUM_ENVS = 8


def main() -> None:
    tf.random.set_seed(0)
    tf.get_logger().setLevel("ERROR")
    batch = parallel_py_environment.ParallelPyEnvironment(
        [lambda: gymnasium.make("CartPole-v1")] * NUM_ENVS,
        envs_per_actor=4,  # they are cheap: eight actors would cost more calls
        seed=0,
        ray_init={"include_dashboard": False, "logging_level": "ERROR"},
    )
    env = tf_py_environment.TFPyEnvironment(batch)
    agent = reinforce_agent.ReinforceAgent(
        env.time_step_spec(),
        env.action_spec(),
        actor_distribution_network.ActorDistributionNetwork(
            env.observation_spec(), env.action_spec(), fc_layer_params=(64,)
        ),
        optimizer=tf.keras.optimizers.legacy.Adam(0.01),
        normalize_returns=True,
    )
    agent.initialize()
    buffer = tf_uniform_replay_buffer.TFUniformReplayBuffer(
        agent.collect_data_spec, batch_size=NUM_ENVS, max_length=2000
    )
    average_return = tf_metrics.AverageReturnMetric(buffer_size=50, batch_size=NUM_ENVS)
    driver = dynamic_episode_driver.DynamicEpisodeDriver(
        env, agent.collect_policy, [buffer.add_batch, average_return], num_episodes=16
    )
    collect, train = common.function(driver.run), common.function(agent.train)

    for iteration in range(30):
        collect(env.reset())
        if iteration == 0:
            print(f"average return untrained: {average_return.result():.1f}", flush=True)
        train(buffer.gather_all())
        buffer.clear()
        if iteration % 10 == 9:
            print(f"iteration {iteration + 1}: {average_return.result():.1f}", flush=True)
    print(f"average return trained: {average_return.result():.1f}")
    batch.close()


if __name__ == "__main__":
    main()
