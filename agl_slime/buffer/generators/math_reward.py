r"""Rule-based rewards for mathematics: whether the last ``\boxed{…}`` of an answer equals the label."""

from __future__ import annotations

import re
from fractions import Fraction

_BRACES = re.compile(r"\\boxed\{|[{}]")
_FRACTION = re.compile(r"^(-?)\\[dt]?frac\{(-?[\d.]+)\}\{(-?[\d.]+)\}$")
_NOISE = re.compile(r"\\(?:left|right|,|;|!|:| )|\$|\\text\{([^{}]*)\}|\\(?:mathrm|mathbf)\{([^{}]*)\}|\s+")
# A number of limited size: commas between thousands only, and no huge exponent.
_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d{1,400})?(\.\d{0,400})?(e[+-]?\d{1,3})?", re.IGNORECASE)


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete ``\boxed{…}``, with nested braces; ``None`` when there is none."""
    opened: list[tuple[int, bool]] = []
    last: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        if match.group() != "}":
            opened.append((match.end(), match.group() != "{"))
        elif opened:
            start, is_box = opened.pop()
            if is_box and (last is None or start > last[0]):
                last = start, match.start()
    return None if last is None else text[slice(*last)]


def same_answer(answer: str, label: str) -> bool:
    """Whether two answers are equal: as numbers if both are (integers, decimals, fractions, percentages), else as text
    without spacing and markup."""
    left, right = _number(answer), _number(label)
    if left is not None and right is not None:
        return left == right
    return _plain(answer) == _plain(label)


def boxed_reward(response: str, label: str) -> float:
    r"""1.0 when the last ``\boxed{…}`` of the response is the label (or the label's own box), else 0.0."""
    answer = last_boxed(response)
    expected = last_boxed(label)
    return 1.0 if answer is not None and same_answer(answer, expected if expected is not None else label) else 0.0


def _plain(text: str) -> str:
    plain = _NOISE.sub(lambda match: match.group(1) or match.group(2) or "", text).rstrip(".")
    return plain.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("{,}", ",")


def _number(text: str) -> Fraction | None:
    plain = _plain(text).replace("\\%", "%")
    if (match := _FRACTION.match(plain)) is not None:
        plain = f"{match.group(1)}{match.group(2)}/{match.group(3)}"
    numerator, slash, denominator = plain.removesuffix("%").partition("/")
    if not _NUMBER.fullmatch(numerator) or not _NUMBER.fullmatch(denominator):
        return None
    try:
        value = Fraction(numerator.replace(",", ""))
        value /= Fraction(denominator.replace(",", "")) if slash else 1
    except (ValueError, ZeroDivisionError):
        return None
    return value / 100 if plain.endswith("%") else value
