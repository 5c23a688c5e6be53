"""What kind of traffic a request is: the label that statistics, metrics and the kill switch tell requests apart by.

A caller may name the class of a request. Where none is named, a rule looks at the text, no further than its beginning
and its end: it takes some thirty microseconds, and is right often enough for statistics that only have to separate code
from chat. The first line that holds decides:

    code           code fences, or lines that begin as code does; words like function, refactor, python
    rag            a long text that names its passages, documents or context, and asks a question
    summarization  a long text, with words like summarize, tl;dr, key points
    structured     asks for JSON, CSV, XML, YAML, SQL, or a table of something
    multilingual   letters that are mostly not ASCII, the word translate, or small words of another language
    math           words like solve or probability; an equation; or several numbers and a question about them
    creative       words like story, poem, invent
    chat           everything else

Names come from outside and become labels that are kept for ever, so their number is limited: `ClassNames` is the one
home of that limit.
"""

from __future__ import annotations

import re
from typing import NamedTuple

OTHER = "other"
MOST_CLASSES = 32
INFERRED = ("code", "rag", "summarization", "structured", "multilingual", "math", "creative", "chat")
"""What the rule can answer."""
_MOST_LABEL_CHARACTERS = 32
_SEEN_CHARACTERS = 2048
"""Characters at each end of a text that are looked at for marks of code and for letters."""
_ASKING_CHARACTERS = 400
"""Characters at each end whose words are looked at: what is wanted stands there, the material in between."""
_LONG_CHARACTERS = 500
"""A text that is worth summarizing, or that can hold passages to answer from."""


TEMPERATURES = ("at temperature 0", "below temperature 1", "about temperature 1", "far above temperature 1")
"""The bands of temperature that are told apart: what is foreseen at one of them need not be at the next."""
_HIGH_TEMPERATURE = 1.25


def temperature_band(temperature: float) -> int:
    """The place of a temperature among TEMPERATURES."""
    if temperature == 0.0:
        return 0
    return 1 if temperature < 1.0 else 2 if temperature < _HIGH_TEMPERATURE else 3


class Line(NamedTuple):
    """Texts of one class in one band of temperature: what a drafter is worth for one of them it is for the others."""

    workload_class: str
    band: int

    def __str__(self) -> str:
        return f"{self.workload_class} {TEMPERATURES[self.band]}"


class BoundedNames:
    """Names that are told apart, up to a limit; whatever comes later is "other"."""

    def __init__(self, most: int, always: tuple[str, ...] = ()) -> None:
        self._most = most
        self._names = {OTHER, *always}  # these cannot be crowded out

    def known(self, name: str) -> str:
        """The name itself if it has a place or can still get one, else "other"."""
        if name not in self._names:
            if len(self._names) >= self._most:
                return OTHER
            self._names.add(name)
        return name


class ClassNames(BoundedNames):
    """The classes with numbers of their own. Those of the rule always have a place, whatever callers invent."""

    def __init__(self) -> None:
        super().__init__(MOST_CLASSES, INFERRED)

    def known_line(self, line: Line) -> Line:
        """The line itself, or that of all classes without a place of their own."""
        return Line(self.known(line.workload_class), line.band)


def class_of(header: str | None, metadata: str | None, *, text: str) -> str:
    """The class that a caller named, in a header before the metadata, or the one that the prompt's text looks like."""
    return label_of(header or "") or label_of(metadata or "") or inferred_class(text)


def label_of(name: str) -> str:
    """The name as a label: lower case letters, digits, _ and -, at most 32 of them; empty if nothing is left."""
    return (
        _NO_LABEL.sub("-", name[: 4 * _MOST_LABEL_CHARACTERS].lower()).strip("-")[:_MOST_LABEL_CHARACTERS].rstrip("-")
    )


def inferred_class(text: str) -> str:
    """The class that a text looks like, by the rule above."""
    seen = text if len(text) <= 2 * _SEEN_CHARACTERS else f"{text[:_SEEN_CHARACTERS]}\n{text[-_SEEN_CHARACTERS:]}"
    ends = text if len(text) <= 2 * _ASKING_CHARACTERS else f"{text[:_ASKING_CHARACTERS]}\n{text[-_ASKING_CHARACTERS:]}"
    asking = ends.lower()
    words = set(asking.encode(errors="ignore").translate(_APART).decode().split())
    if _is_code(seen, words):
        return "code"
    if len(text) >= _LONG_CHARACTERS and (name := _class_of_long(asking, words)):
        return name
    if words & _DATA_FORMATS or any(phrase in asking for phrase in _TABLE_PHRASES):
        return "structured"
    if _is_foreign(seen, words):
        return "multilingual"
    if _is_math(asking, words):
        return "math"
    return "creative" if words & _FICTION else "chat"


def _class_of_long(asking: str, words: set[str]) -> str | None:
    """What is wanted of a text that comes with its material, if that is to answer from it or to shorten it."""
    if words & _SOURCES and ("?" in asking or "question" in words):
        return "rag"
    if words & _SUMMARY or any(phrase in asking for phrase in _SUMMARY_PHRASES):
        return "summarization"
    return None


def _is_code(seen: str, words: set[str]) -> bool:
    fence = seen.find("```")
    if fence >= 0:
        return not seen[fence + 3 : fence + 16].lower().startswith(_DATA_FENCES)
    if _CODE_LINE.search(seen) or _CODE_LINE.match(f"\n{seen[:80]}") or "();" in seen:
        return True
    return bool(words & _LANGUAGES) or len(words & _CODE_WORDS) >= 2


def _is_foreign(seen: str, words: set[str]) -> bool:
    if words & _TRANSLATION:
        return True
    if not seen.isascii() and len(seen.encode("ascii", "ignore")) < len(seen) / 2:
        return True
    num_foreign = len(words & _FOREIGN)
    return num_foreign >= 2 and num_foreign > len(words & _ENGLISH)


def _is_math(asking: str, words: set[str]) -> bool:
    if words & _MATH or (" = " in asking and any(sign in asking for sign in _SIGNS)):
        return True
    return any(phrase in asking for phrase in _AMOUNT_PHRASES) and sum(word[0].isdigit() for word in words) >= 2


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NO_LABEL = re.compile(r"[^a-z0-9_-]+")
_CODE_LINE = re.compile(
    # prose may begin a line with class, from or public too
    r"\n *(?:def \w+\(|class \w+ ?[:({]|import \w+\n|import \w+ as |from [\w.]+ import |function \w+\(|fn \w+|func \w+"
    r"|#include|public (?:static|class|void)|const \w+ = )"
)
_APART = bytes.maketrans(b".,;:!?()[]{}<>\"'`/\n", b" " * 19)  # bytes: ten times as fast where text is not ASCII
_SIGNS = ("+", "-", "*", "/", "^")

_DATA_FENCES = ("json", "csv", "xml", "yaml", "toml", "html", "sql", "markdown", "text")
_LANGUAGES = _words("python javascript typescript java rust golang kotlin haskell bash pytest regex")
_CODE_WORDS = _words(
    "code function functions method methods class variable variables refactor debug bug compile compiler loop "
    "algorithm implement script program api test tests unit stack recursion recursive array string docstring"
)
_SOURCES = _words("passage passages context document documents excerpt excerpts source sources")
_SUMMARY = _words("summarize summarise summary summaries tldr condense shorten abridge outline gist")
_SUMMARY_PHRASES = ("tl;dr", "key fact", "key point", "main point", "important point", "main idea")
_DATA_FORMATS = _words("json csv tsv xml yaml toml sql html schema jsonl")
_TABLE_PHRASES = ("markdown table", "as a table", "into a table", "table of", "table with", "this table", "fill this")
_TRANSLATION = _words("translate translation traduis traduisez traduci traduce traduza übersetze übersetzen")
_ENGLISH = _words("the of and to in is that it for with as are on what how you this a do i")
_FOREIGN = _words(
    # small words of German, French, Spanish, Italian, Portuguese and Dutch that English does not have
    "der das und ist nicht ein eine wie warum mit für auf le les des une est que dans pour comment el los las una "
    "para por qué cómo il che di della una perché uma um não como devo het een en van niet wat"
)
_MATH = _words(
    "solve prove proof equation equations probability calculate compute integral derivative theorem "
    "multiplication multiples multiply divisible fraction fractions polynomial geometry algebra sqrt"
)
_AMOUNT_PHRASES = ("how many", "how much", "how long", "how far", "how fast", "average", "percent", "total", " sum ")
_FICTION = _words(
    "story stories poem poems poetry haiku sonnet lyrics song dialogue diary novel fairy tale fable limerick "
    "invent imagine fiction fictional screenplay monologue stanza stanzas"
)
