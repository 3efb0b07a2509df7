"""A completion's text comes in pieces that are whole characters, and ends before a text that stops it."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.serve.instance.streamed_text import StreamedText


class Bytes:
    """A tokenizer whose tokens are bytes: characters have several."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return bytes(tokens).decode(errors="replace")


def pieces(text: str, stop: Sequence[str] = ()) -> tuple[list[str], bool]:
    streamed = StreamedText(Bytes(), stop)
    found = []
    for token in text.encode():
        found.append(streamed.add(token))
        if streamed.is_stopped:
            break
    return [*found, streamed.end()], streamed.is_stopped


def test_a_character_comes_when_it_is_whole() -> None:
    found, stopped = pieces("aé€b")
    assert found == ["a", "", "é", "", "", "€", "b", ""] and not stopped


def test_bytes_that_make_no_character_come_at_the_end() -> None:
    streamed = StreamedText(Bytes())
    assert streamed.add("€".encode()[0]) == ""
    assert streamed.end() == "\ufffd"


def test_what_may_be_the_beginning_of_a_stop_is_held_back() -> None:
    found, stopped = pieces("one END two", ["END"])
    assert "".join(found) == "one " and stopped
    assert "E" not in "".join(found)
    found, stopped = pieces("one EN two", ["END"])
    assert "".join(found) == "one EN two" and not stopped
    assert pieces("one E", ["END"]) == (["o", "n", "e", " ", "", "E"], False)


@given(st.text("abé", max_size=30), st.lists(st.text("abé", min_size=1, max_size=3), max_size=3))
def test_pieces_add_up_to_the_text_before_the_first_stop(text: str, stop: list[str]) -> None:
    found, stopped = pieces(text, stop)
    ends = [text.find(word) + len(word) for word in stop if word in text]
    # The one that ends first stops it; of those that end together, the longest.
    end = min(ends, default=len(text))
    begins = [end - len(word) for word in stop if word in text and text.find(word) + len(word) == end]
    assert "".join(found) == text[: min(begins, default=len(text))] and stopped == bool(ends)
