"""The demo's document: the manual and day book of a lighthouse that never was.

Made in code, the same on every machine and Python, and long enough to be worth a cache.
"""

from __future__ import annotations

from collections.abc import Iterator

DAYS = 63

QUESTIONS = (
    "What is this document about?",
    "Which rules must the keeper follow?",
)

_RULES = (
    "The lamp is lit half an hour before sunset, and no errand on the mainland excuses a late one.",
    "When the lamp smokes, the keeper trims the wick, wipes the glass, and notes the hour.",
    "In fog the horn sounds three times a minute, and the boat stays on its rope.",
    "Oil is drawn from the north tank on odd days and from the south tank on even days.",
    "A ship that asks for shelter is answered by flag first, and by boat only in daylight.",
    "Whoever wakes the second keeper without need makes breakfast for a week.",
)
_WINDS = (
    "northerly",
    "light and from the east",
    "squally",
    "steady from the south",
    "backing west",
)
_SEAS = ("a long swell", "short grey waves", "hardly a ripple", "white water on the bar")
_SHIPS = (
    "Amaranth",
    "Patient Margaret",
    "Gull of Orrin",
    "Second Harvest",
    "Tobias Lund",
    "Kestrel",
)
_RIGS = ("a brig", "a coaster", "a two-masted schooner", "a steam tug", "a fishing smack")
_PORTS = ("Orrin", "Saltmarsh Quay", "Vell", "the Narrow Isles", "Hobbin's Landing")
_GOODS = ("barrels of tar", "sacks of barley", "crates of lamp glass", "coils of rope", "bricks")
_REPAIRS = (
    "the hinge of the gallery door was filed and greased",
    "a cracked pane on the seaward side was marked with chalk",
    "the third stair from the top was nailed down again",
    "the clockwork was stopped, brushed and wound",
    "the rain barrel was moved away from the wall",
)
_VISITORS = (
    "the doctor",
    "a painter of birds",
    "two boys with a kite",
    "the oil merchant",
    "nobody",
)


class _Dice:
    """The same throws everywhere: a linear congruential generator of 64 bits."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def below(self, bound: int) -> int:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self._state >> 33) % bound

    def pick(self, among: tuple[str, ...]) -> str:
        return among[self.below(len(among))]


def document(days: int = DAYS, seed: int = 1) -> str:
    """`days` entries of the day book, then the rules; other seeds give other days."""
    entries = "\n".join(_entries(days, _Dice(seed)))
    rules = "\n".join(f"Rule {i}. {rule}" for i, rule in enumerate(_RULES, start=1))
    return f"Brackwater Light: the day book\n\n{entries}\n\nThe keeper's rules\n\n{rules}"


def _entries(days: int, dice: _Dice) -> Iterator[str]:
    oil = 900 + dice.below(100)
    for day in range(1, days + 1):
        used = 6 + dice.below(9)
        oil -= used
        text = (
            f"Day {day}. Wind {dice.pick(_WINDS)}, {dice.pick(_SEAS)}; "
            f"glass at {985 + dice.below(50)}. "
            f"The {dice.pick(_SHIPS)}, {dice.pick(_RIGS)} out of {dice.pick(_PORTS)}, passed at "
            f"{4 + dice.below(17)}:{dice.below(60):02d} with {12 + dice.below(300)} "
            f"{dice.pick(_GOODS)}. Before noon {dice.pick(_REPAIRS)}. "
            f"Visitors: {dice.pick(_VISITORS)}. The lamp took {used} pints"
        )
        if oil < 200:
            oil += 700
            yield f"{text}, and with the new delivery {oil} are left."
        else:
            yield f"{text}, and {oil} are left."


def prompt(text: str, question: str) -> str:
    """The document first and the question last, so that questions share the document."""
    return f"{text}\n\n{question}"
