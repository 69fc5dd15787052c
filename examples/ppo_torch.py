"""PPO on CartPole in plain PyTorch, on the vector environment of Gymnasium's kind.

    python examples/ppo_torch.py

Needs PyTorch: pip install torch
"""

from __future__ import annotations

import argparse

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from envfleet.interop.gymnasium import RayVectorEnv

NUM_ENVS, NUM_STEPS, NUM_EPOCHS = 8, 32, 20
GAMMA, LAMBDA, CLIP, LEARNING_RATE = 0.98, 0.8, 0.2, 1e-3


class ActorCritic(nn.Module):
    def __init__(self, num_inputs: int, num_actions: int) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(
                *(nn.Linear(num_inputs, 64), nn.Tanh()),
                *(nn.Linear(64, 64), nn.Tanh()),
                nn.Linear(64, num_outputs),
            )
            for num_outputs in (num_actions, 1)
        )

    def policy(self, observations: Tensor) -> torch.distributions.Categorical:
        return torch.distributions.Categorical(logits=self.actor(observations))

    def value(self, observations: Tensor) -> Tensor:
        return self.critic(observations).squeeze(-1)


class Rollouts:
    """Experience of all environments, `NUM_STEPS` of each at a time."""

    def __init__(self, envs: RayVectorEnv, model: ActorCritic, seed: int) -> None:
        self.envs, self.model = envs, model
        observations, _ = envs.reset(seed=seed)
        self.observations = torch.from_numpy(observations)

    @torch.no_grad()
    def collect(self) -> dict[str, Tensor]:
        rows = []
        for _ in range(NUM_STEPS):
            policy = self.model.policy(self.observations)
            actions = policy.sample()
            following, rewards, terminated, truncated, infos = self.envs.step(actions.numpy())
            # An episode that time has cut short would have gone on from the state it was cut in.
            # With SAME_STEP that is in the infos: `following` is of the next episode.
            bonus = np.zeros(NUM_ENVS)
            cut = np.flatnonzero(truncated & ~terminated)
            if len(cut):
                final = torch.from_numpy(np.stack(infos["final_obs"][cut]))
                bonus[cut] = GAMMA * self.model.value(final).numpy()
            rows.append(
                {
                    "observations": self.observations,
                    "actions": actions,
                    "log_probs": policy.log_prob(actions),
                    "values": self.model.value(self.observations),
                    "rewards": torch.from_numpy(rewards + bonus).float(),
                    "goes_on": torch.from_numpy(~(terminated | truncated)).float(),
                }
            )
            self.observations = torch.from_numpy(following)
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        batch["advantages"] = self.advantages(batch)
        batch["returns"] = batch["advantages"] + batch["values"]
        return {name: column.flatten(0, 1) for name, column in batch.items()}

    def advantages(self, batch: dict[str, Tensor]) -> Tensor:
        """Generalised advantage estimates, from the last step back to the first."""
        advantages = torch.zeros_like(batch["rewards"])
        following, advantage = self.model.value(self.observations), torch.zeros(NUM_ENVS)
        for t in reversed(range(NUM_STEPS)):
            goes_on = batch["goes_on"][t]
            error = batch["rewards"][t] + GAMMA * following * goes_on - batch["values"][t]
            advantage = error + GAMMA * LAMBDA * goes_on * advantage
            advantages[t], following = advantage, batch["values"][t]
        return advantages


def improve(
    model: ActorCritic, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], left: float
) -> None:
    """Several steps of gradient on one batch; `left` falls from 1 to 0 while the run goes on."""
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * left
    clip = CLIP * left
    advantages = batch["advantages"]
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    for _ in range(NUM_EPOCHS):
        log_probs = model.policy(batch["observations"]).log_prob(batch["actions"])
        ratios = (log_probs - batch["log_probs"]).exp()
        gains = torch.min(ratios * advantages, ratios.clamp(1 - clip, 1 + clip) * advantages)
        errors = model.value(batch["observations"]) - batch["returns"]
        loss = 0.5 * errors.square().mean() - gains.mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


@torch.no_grad()
def evaluate(model: ActorCritic, num_episodes: int = 20) -> float:
    """Mean return of the most probable actions."""
    env, total = gymnasium.make("CartPole-v1"), 0.0
    for episode in range(num_episodes):
        observation, _ = env.reset(seed=1000 + episode)
        over = False
        while not over:
            action = model.actor(torch.from_numpy(observation)).argmax().item()
            observation, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            over = terminated or truncated
    return total / num_episodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--timesteps", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the networks are small, and the cores have environments to step

    # A step of CartPole costs less than a remote call does, so four of them share one.
    envs = RayVectorEnv(
        "CartPole-v1", num_envs=NUM_ENVS, autoreset_mode="SameStep", envs_per_actor=4
    )
    model = ActorCritic(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-5)
    rollouts = Rollouts(envs, model, args.seed)
    num_updates = args.timesteps // (NUM_ENVS * NUM_STEPS)
    for update in range(num_updates):
        improve(model, optimizer, rollouts.collect(), 1 - update / num_updates)
    envs.close()
    print(f"return after {args.timesteps} steps: {evaluate(model):.1f}")


if __name__ == "__main__":
    main()
