"""Class attributes hold for the hooks of the class that states them."""

import pytest

from sparsity.core.statements import is_stated


def hook(self):
    """Returns nothing."""


class Base:
    """Has two hooks, of which the attribute speaks."""

    keeps = True
    select = move = hook


class Statement:
    """A mixin that states the attribute, and has no hook."""

    keeps = True


class Override:
    """A mixin that overrides a hook, and states nothing."""

    def select(self):
        """Returns nothing."""


class StatingOverride:
    """A mixin that overrides a hook, and states the attribute."""

    keeps = True

    def select(self):
        """Returns nothing."""


class Child(Base):
    """Overrides a hook."""

    def select(self):
        """Returns nothing."""


class StatingChild(Base):
    """Overrides a hook and states the attribute."""

    keeps = True

    def select(self):
        """Returns nothing."""


class Stating(Base):
    """States the attribute for the hooks of the base."""

    keeps = True


@pytest.mark.parametrize(
    ("bases", "holds"),
    [
        ([Base], True),
        ([Child], False),
        ([StatingChild], True),
        ([Override, Base], False),
        ([Override, StatingChild], False),
        ([Statement, Base], True),
        ([Statement, Child], True),
        ([StatingOverride, Base], True),
        ([Statement, Override, Base], True),
        ([Override, Statement, Base], True),
        ([Override, StatingOverride, Base], False),
        ([Stating, Child], False),
        ([Child, Stating], False),
        ([Base, Override], True),  # the base's hook is called
        ([Override], False),
    ],
    ids=lambda value: "+".join(x.__name__ for x in value) if isinstance(value, list) else "",
)
def test_a_statement_holds_for_the_hooks_that_its_class_knows(bases, holds):
    cls = type("Derived", tuple(bases), {})
    assert is_stated(cls, "keeps", ("select", "move")) == holds
    assert is_stated(type("Below", (cls,), {}), "keeps", ("select", "move")) == holds
    overridden = type("Overridden", (cls,), {"move": lambda self: None})
    assert not is_stated(overridden, "keeps", ("select", "move"))
    assert is_stated(overridden, "keeps", ("select",)) == holds
    again = type("Again", (overridden,), {"keeps": True})
    assert is_stated(again, "keeps", ("select", "move"))
