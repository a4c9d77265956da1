"""Work that is counted, so that no schema takes longer than others wait for.

Steps and not seconds: the same schema is taken or refused on every machine.
"""

__all__ = ["Spent", "Steps"]


class Spent(Exception):
    """More work than there is room for."""


class Steps:
    """A number of steps that all parts of a piece of work share."""

    def __init__(self, n_steps: int) -> None:
        self.n_left = n_steps

    def spend(self, n_steps: int = 1) -> None:
        """Raises Spent: so many are not left."""
        self.n_left -= n_steps
        if self.n_left < 0:
            raise Spent
