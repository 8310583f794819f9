"""Tokenizes texts: keeps the tokens that the tokenizer adds before a text, and drops those that it adds behind it."""

from collections.abc import Sequence

from sbeval.corpora.tokenizers import added_tokens, encode_together, special_beginnings
from sbeval.model_adapters.open.opened import Opened


def encode_prompts(opened: Opened, texts: Sequence[str], *, quiet: bool) -> list[list[int]]:
    """Returns each prompt's tokens as `encode_texts` does. An empty prompt becomes the model's prefix token."""
    return [tokens or [opened.prefix_token_id] for tokens in encode_texts(opened, texts, quiet=quiet)]


def encode_texts(
    opened: Opened, texts: Sequence[str], *, beginnings: tuple[str, ...] = (), quiet: bool
) -> list[list[int]]:
    """Returns each text's tokens, with the prefix that the tokenizer or `add_bos_token` adds.

    The tokenizer's suffix, such as EOS, is dropped because a continuation follows directly; `template_suffix=keep`
    keeps it. Nothing is added to a text that begins with the tokenizer's prefix or with one of `beginnings`.
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
