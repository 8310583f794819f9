"""Token ids of ordinary text, with which a changed model is compared with the model before the change.

The ids 0, 1, 2 and so on would be unsuitable: in most tokenizers low ids are special tokens, which never follow one
another in a text. Rounding can move the logits after them 40 times as far as those of ordinary text.
"""

from typing import Any

TEXT = (
    "The harbour lay quiet before sunrise, and only two boats had left it. An old man with a red lamp counted nets, "
    "seven of them torn, while his daughter wrote numbers into a small blue book: 14 crates of herring, 3 of cod, 250 "
    "metres of rope. Nobody spoke about the storm. Far behind the church a dog barked twice; then bells began to ring."
)
_LEAST_KINDS = 3  # if fewer than a third of the token ids are distinct, the tokenizer hardly knows the text


def sample_tokens(tokenizer: Any, embeddings: int, count: int) -> list[int]:
    """Returns `count` token ids of ordinary text, all below `embeddings`, the number of rows in the embedding matrix.

    If the tokenizer hardly knows the text, the ids are evenly spaced over the ordinary tokens of its vocabulary.
    Without a tokenizer they are evenly spaced over the embeddings but the first and the last eighth, where special
    tokens usually are.
    """
    if tokenizer is None:
        return _spread(range(embeddings // 8, max(embeddings // 8 + 1, embeddings - embeddings // 8)), count)
    tokens = [token for token in tokenizer.encode(TEXT, add_special_tokens=False) if token < embeddings][:count]
    if len(set(tokens)) < count // _LEAST_KINDS:
        special = set(tokenizer.all_special_ids)
        known = sorted(token for token in tokenizer.get_vocab().values() if token < embeddings and token not in special)
        return _spread(known, count)
    return [tokens[place % len(tokens)] for place in range(count)]


def _spread(tokens: Any, count: int) -> list[int]:
    apart = tokens[:: max(1, len(tokens) // count)]
    return [int(apart[place % len(apart)]) for place in range(count)]
