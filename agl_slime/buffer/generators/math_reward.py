r"""Rule-based rewards for mathematics: is the last ``\boxed{…}`` of an answer what the label says?"""

from __future__ import annotations

import re
from fractions import Fraction

_FRACTION = re.compile(r"^(-?)\\[dt]?frac\{(-?[\d.]+)\}\{(-?[\d.]+)\}$")
_NOISE = re.compile(r"\\(?:left|right|,|;|!|:| )|\$|\\text\{([^{}]*)\}|\\(?:mathrm|mathbf)\{([^{}]*)\}|\s+")


def last_boxed(text: str) -> str | None:
    r"""What stands in the last complete ``\boxed{…}``, braces within braces included; ``None`` when there is none."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth = 0
        for position in range(start + len("\\boxed"), len(text)):
            if text[position] == "{":
                depth += 1
            elif text[position] == "}":
                depth -= 1
                if depth == 0:
                    return text[start + len("\\boxed{") : position]
        start = text.rfind("\\boxed{", 0, start)
    return None


def same_answer(answer: str, label: str) -> bool:
    """Equal as numbers when both are numbers (integers, decimals, fractions, percentages), else equal as text without
    spacing and markup."""
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
    return (
        _NOISE.sub(lambda match: match.group(1) or match.group(2) or "", text)
        .rstrip(".")
        .replace("\\dfrac", "\\frac")
        .replace("\\tfrac", "\\frac")
    )


def _number(text: str) -> Fraction | None:
    plain = _plain(text).replace(",", "").replace("\\%", "%")
    if (match := _FRACTION.match(plain)) is not None:
        plain = f"{match.group(1)}{match.group(2)}/{match.group(3)}"
    percent = plain.endswith("%")
    numerator, slash, denominator = plain.rstrip("%").partition("/")
    try:
        value = Fraction(numerator) / (Fraction(denominator) if slash else 1)
    except (ValueError, ZeroDivisionError):
        return None
    return value / 100 if percent else value
