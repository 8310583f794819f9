"""A document too long to be encoded at once: in pieces that overlap, joined where both have the same tokens.

A tokenizer takes some hundred bytes of memory for each character while it works. A piece's tokens are wrong only near
its ends, where the text beside them is missing: two pieces are joined in the middle of their overlap, at tokens that
both have.

Legend: n tokens of a piece or of a document.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora.documents import Document
from sbeval.errors import UserError

PIECE_CHARACTERS = 2**21
_OVERLAP_CHARACTERS = 2**13
_SAME_TOKENS = 16


class DocumentTokens(NamedTuple):
    """Tokens in the order of the text.

    Attributes:
        ids: int32 [n].
        ends: character behind each token, int64 [n], or None where the tokenizer does not tell it.
    """

    ids: NDArray[np.int32]
    ends: NDArray[np.int64] | None

    @classmethod
    def of(cls, ids: list[int], spans: list[tuple[int, int]] | None, shift: int = 0) -> Self:
        """Returns what a tokenizer has told of a text that begins `shift` characters into its document."""
        ends = None if spans is None else shift + np.fromiter((end for _, end in spans), np.int64, len(spans))
        return cls(np.asarray(ids, np.int32), ends)


def long_document_tokens(document: Document, tokenizer: Any, *, special_tokens: bool) -> Iterator[DocumentTokens]:
    """Yields the tokens of a document piece by piece.

    Args:
        document: of more than `PIECE_CHARACTERS`.
        tokenizer: a fast one.
        special_tokens: whether the tokenizer adds those that belong around a text.

    Raises:
        UserError: two pieces have no tokens in common where they overlap.
    """
    starts = range(0, len(document.text) - _OVERLAP_CHARACTERS, PIECE_CHARACTERS - _OVERLAP_CHARACTERS)
    before: DocumentTokens | None = None
    first = 0
    for start in starts:
        text = document.text[start : start + PIECE_CHARACTERS]
        encoded = tokenizer(
            text,
            add_special_tokens=special_tokens,
            return_attention_mask=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        piece = DocumentTokens.of(encoded["input_ids"], encoded["offset_mapping"], start)
        if before is not None:
            joint = _joint(before, piece, start + _OVERLAP_CHARACTERS // 2)
            if joint is None:
                raise UserError(
                    f"Expected a document that can be encoded in pieces of {PIECE_CHARACTERS:,} characters, found "
                    f"{document.name!r} of {len(document.text):,}, whose tokens around character {start:,} depend on "
                    "what lies far from them: cut the text into documents, such as lines of a .jsonl file."
                )
            yield _between(before, first, joint[0])
            first = joint[1]
        before = piece
    if before is not None:
        yield _between(before, first, len(before.ids))


def _between(piece: DocumentTokens, first: int, last: int) -> DocumentTokens:
    assert piece.ends is not None
    return DocumentTokens(piece.ids[first:last], piece.ends[first:last])


def _joint(before: DocumentTokens, after: DocumentTokens, middle: int) -> tuple[int, int] | None:
    """Returns where `_SAME_TOKENS` tokens of both are the same, as close behind `middle` as there are any."""
    assert before.ends is not None
    assert after.ends is not None
    # a token behind the text tells no character
    ends, others = np.maximum.accumulate(before.ends), np.maximum.accumulate(after.ends)
    one, other = int(np.searchsorted(ends, middle)), int(np.searchsorted(others, middle))
    while max(one + _SAME_TOKENS - len(ends), other + _SAME_TOKENS - len(others)) <= 0:
        here, there = slice(one, one + _SAME_TOKENS), slice(other, other + _SAME_TOKENS)
        if np.array_equal(before.ids[here], after.ids[there]) and np.array_equal(ends[here], others[there]):
            return one, other
        step = int(ends[one]) - int(others[other])
        one, other = one + (step <= 0), other + (step >= 0)
    return None
