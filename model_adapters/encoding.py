"""Tokenizes texts: keeps tokens that the tokenizer adds before a text, such as BOS, and drops those it adds after."""

from collections.abc import Sequence

from sbeval.corpora.tokenizers import added_tokens, encode_together, special_beginnings
from sbeval.model_adapters.open.opened import Opened


def encode_prompts(opened: Opened, texts: Sequence[str], *, quiet: bool) -> list[list[int]]:
    """Returns the tokens of prompts as `encode_texts` does. An empty prompt becomes the prefix token (BOS or EOS)."""
    return [tokens or [opened.prefix_token_id] for tokens in encode_texts(opened, texts, quiet=quiet)]


def encode_texts(
    opened: Opened, texts: Sequence[str], *, beginnings: tuple[str, ...] = (), quiet: bool
) -> list[list[int]]:
    """Returns the tokens of each text, with the prefix, such as BOS, that the tokenizer or `add_bos_token` adds.

    A suffix that the tokenizer adds, such as EOS, is dropped because a continuation follows the text directly;
    `template_suffix=keep` keeps it. Nothing is added to a text that already begins with the text of a special token
    from the tokenizer's prefix, or with one of `beginnings`.
    """
    prefixes = (*special_beginnings(opened.tokenizer), *beginnings)
    begins = [text.startswith(prefixes) for text in texts]
    added = added_tokens(opened.tokenizer)
    encoded: dict[int, list[int]] = {}
    for has_prefix in (True, False):
        adds = False if has_prefix else opened.add_bos_token
        options = {} if adds is None else {"add_special_tokens": adds}
        chosen = [index for index, begin in enumerate(begins) if begin is has_prefix]
        tokens = encode_together(opened.tokenizer, [texts[index] for index in chosen], quiet=quiet, **options)
        if adds is not False and opened.options.template_suffix == "drop":
            tokens = list(map(added.without_suffix, tokens))
        encoded.update(zip(chosen, tokens, strict=True))
    return [encoded[index] for index in range(len(texts))]
