"""Recall text: names get numbers, and later text of the same training window asks for them.

Three kinds, all built from a seed and an index alone:

- assignments inside real code (`quiet_lantern = 4821973` ... `print(quiet_lantern)  # 4821973`);
- sentences inside the comments of real code;
- sentences among plain filler sentences, in the style of needle-in-a-haystack prompts.
"""

import math
import random
import re
from collections import Counter
from collections.abc import Sequence

CODE, COMMENT, PLAIN = range(3)
KIND_WEIGHTS = (0.35, 0.25, 0.4)
KEY_WORD = re.compile(r"(?<=[ (])[a-z]{4,9}(?=[ ,.)])")
WINDOW_CHARS = 4800
QUERIED_CHARS = 2800
MIN_DISTANCE_CHARS = 60
PAIRS = (1, 6)

_FILLERS = (
    ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again."),
    ("The river is wide.", "The stones are cold.", "A bird sings in the tree.", "We walk along the road."),
    (
        "It rained all day.",
        "The train was late again.",
        "Nobody minded.",
        "Tea was served at five.",
        "Then it got dark.",
    ),
    ("The door is open.", "A cat sleeps on the chair.", "The clock on the wall has stopped."),
)
# (the sentence that gives the number, the question, the start of the answer)
_PHRASINGS = (
    (
        "One of the special magic numbers for {key} is: {value}.",
        "What is the special magic number for {key} mentioned in the provided text?",
        "The special magic number for {key} mentioned in the provided text is",
    ),
    (
        "The special magic number for {key} is: {value}.",
        "What is the special magic number for {key}?",
        "The special magic number for {key} is:",
    ),
    ("The magic number of {key} is {value}.", "Which number belongs to {key}?", "The magic number of {key} is"),
    ("Remember that {key} has the code {value}.", "What was the code of {key}?", "The code of {key} is"),
    ("{key}: {value}", "{key}?", "{key}:"),
)
_PLAIN_INTRODUCTIONS = (
    "",
    "A special magic number is hidden in the text below. Remember it: the question about it comes at the end.\n",
    "Some special magic numbers are hidden in the text below. Remember them.\n",
)


def key_words(texts: Sequence[str], count: int = 4000) -> list[str]:
    """Returns common lower-case words of 4 to 9 letters, without the very commonest, for building keys."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(KEY_WORD.findall(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    skipped = min(200, len(ranked) // 4)
    return ranked[skipped : skipped + count]


class RecallWriter:
    """Writes recall windows as text.

    Args:
        texts: source files, the code that recall lines are mixed into.
        seed: with an index, it alone decides a window.
    """

    def __init__(self, texts: Sequence[str], seed: int) -> None:
        self._texts = texts
        self._seed = seed
        self._words = key_words(texts[: min(len(texts), 1500)])
        if len(self._words) < 2:
            raise ValueError(f"recall keys need words in the texts, found {len(self._words)}")

    def window(self, index: int) -> str:
        """Returns the text of one window, a little longer than 1,024 tokens of code."""
        draw = random.Random(f"recall:{self._seed}:{index}")
        kind = draw.choices((CODE, COMMENT, PLAIN), KIND_WEIGHTS)[0]
        pairs = self._pairs(draw, kind)
        if kind == PLAIN:
            return self._plain_window(draw, pairs)
        return self._code_window(draw, kind, pairs)

    def _pairs(self, draw: random.Random, kind: int) -> list[tuple[str, str]]:
        count = draw.randint(*PAIRS)
        joint = "_" if kind == CODE else draw.choice("-- _")
        keys: dict[str, str] = {}
        while len(keys) < count:
            words = [draw.choice(self._words) for _ in range(2 if draw.random() < 0.85 else 1)]
            digits = 7 if kind != CODE or draw.random() < 0.5 else draw.randint(3, 8)
            keys[joint.join(words)] = str(draw.randrange(10 ** (digits - 1), 10**digits))
        return list(keys.items())

    def _code_window(self, draw: random.Random, kind: int, pairs: list[tuple[str, str]]) -> str:
        lines = self._code_lines(draw)
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line) + 1)
        reachable = max(1, sum(start < QUERIED_CHARS for start in starts[:-1]))
        phrasing = draw.choice(_PHRASINGS)
        inserted: list[tuple[int, int, str]] = []
        for key, value in pairs:
            given = draw.randrange(reachable)
            inserted.append((given, 0, _given(draw, kind, phrasing, key, value)))
            for _ in range(draw.randint(1, 3)):
                asked = _line_at(starts, _asked_char(draw, starts[given]), reachable)
                inserted.append((max(asked, given), 1, _asked(draw, kind, phrasing, key, value)))
        # back to front, so that earlier line numbers stay valid; at one line the giving comes before the asking
        for place, _, text in sorted(inserted, key=lambda item: (-item[0], -item[1])):
            indent = re.match(r"[ \t]*", lines[place])
            prefix = indent.group() if indent else ""
            lines.insert(place, "\n".join(prefix + part for part in text.split("\n")))
        return "\n".join(lines)

    def _plain_window(self, draw: random.Random, pairs: list[tuple[str, str]]) -> str:
        filler = draw.choice(_FILLERS)
        phrasing = draw.choice(_PHRASINGS[:4])
        separator = draw.choice((" ", "\n"))
        length_chars = int(math.exp(draw.uniform(math.log(300), math.log(2600))))
        round_chars = sum(map(len, filler)) + len(filler)
        sentences = list(filler) * max(1, length_chars // round_chars)
        for key, value in pairs:
            sentences.insert(draw.randrange(len(sentences) + 1), phrasing[0].format(key=key, value=value))
        parts = [draw.choice(_PLAIN_INTRODUCTIONS), separator.join(sentences)]
        for key, value in draw.sample(pairs, k=draw.randint(1, len(pairs))):
            parts.append(f"\n{phrasing[1].format(key=key)}{draw.choice((' ', chr(10)))}")
            parts.append(f"{phrasing[2].format(key=key)} {value}.")
        return "".join(parts) + "\n" + "\n".join(self._code_lines(draw))

    def _code_lines(self, draw: random.Random) -> list[str]:
        lines: list[str] = []
        size = 0
        while size < WINDOW_CHARS:
            text = self._texts[draw.randrange(len(self._texts))]
            all_lines = text.split("\n")
            chunk = all_lines[draw.randrange(max(1, len(all_lines) - 40)) :]
            for line in chunk:
                lines.append(line)
                size += len(line) + 1
                if size >= WINDOW_CHARS:
                    break
        return lines


def _asked_char(draw: random.Random, given_char: int) -> float:
    """Draws the position of a question: log-uniform distances, so that short and long ones are equally common."""
    longest = max(QUERIED_CHARS - given_char, MIN_DISTANCE_CHARS + 1)
    return given_char + math.exp(draw.uniform(math.log(MIN_DISTANCE_CHARS), math.log(longest)))


def _line_at(starts: list[int], char: float, reachable: int) -> int:
    for line, start in enumerate(starts[:reachable]):
        if start >= char:
            return line
    return reachable - 1


def _given(draw: random.Random, kind: int, phrasing: tuple[str, str, str], key: str, value: str) -> str:
    if kind == CODE:
        return draw.choice(("{key} = {value}", "{key} = {value}", "{key}: int = {value}")).format(key=key, value=value)
    return "# " + phrasing[0].format(key=key, value=value)


def _asked(draw: random.Random, kind: int, phrasing: tuple[str, str, str], key: str, value: str) -> str:
    if kind == CODE:
        shape = draw.choice(
            (
                "print({key})  # {value}",
                "assert {key} == {value}",
                ">>> {key}\n{value}",
                "{key} = {value}",
                'assert str({key}) == "{value}"',
            )
        )
        return shape.format(key=key, value=value)
    return f"# {phrasing[1].format(key=key)}\n# {phrasing[2].format(key=key)} {value}."
