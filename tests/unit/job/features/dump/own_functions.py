"""Functions such as a user has: not of torch, and bound by name elsewhere."""

FACTOR = 3.0


def scaled(x, y):
    """Calls of torch and of a method."""
    return Holder.twice(x.mul(FACTOR)) + y


def other(x):
    """Not asked for."""
    return x.exp()


class Holder:
    """Has a function of its own."""

    @staticmethod
    def twice(x):
        """Twice the argument."""
        return x + x
