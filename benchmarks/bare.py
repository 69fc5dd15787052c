"""The least that Ray actors can be. Imports nothing, so that their start is Ray's own."""


class Bare:
    """Returns its argument."""

    def step(self, x):
        return x

    reset = step


class BareEnv:
    """Holds an environment."""

    def __init__(self, constructor):
        self.env = constructor()

    def reset(self, _x):
        return self.env.reset()

    def step(self, action):
        result = self.env.step(action)
        return self.env.reset() if result[2] or result[3] else result
