"""The corpus and the tokenizer of a task, from what lm-eval hands it."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from sbeval.tasks.perplexity.settings import Settings

from sbeval.corpora import Corpus, local_corpus, split_wikitext_pages, stdlib_corpus, wikitext_corpus
from sbeval.errors import UserError

_TOKENIZER_ARGUMENTS = ("revision", "subfolder", "trust_remote_code", "add_bos_token")


def load_corpus(task: str, name: str, settings: Settings) -> Corpus:
    """Returns the corpus a task names, read from `data_path` where one was given."""
    if name == "wikitext":
        return wikitext_corpus(lambda: _wikitext_pages(task, settings), detokenize=_detokenize_wikitext)
    if settings.data_path is not None:
        return local_corpus(settings.data_path, name=name)
    if name == "stdlib":
        return stdlib_corpus()
    raise UserError(f"{task}: expected a corpus named wikitext or stdlib, found {name!r}: correct dataset_name.")


def load_tokenizer(task: str, metadata: Mapping[str, Any]) -> Any:
    """Returns the tokenizer of the model under test: `tokenizer` in the model's arguments, else `pretrained`."""
    source = metadata.get("tokenizer") or metadata.get("pretrained")
    if source is None:
        raise UserError(
            f"{task}: expected the model's tokenizer, found neither tokenizer nor pretrained: "
            "name one in --model_args or --metadata."
        )
    if not isinstance(source, str):
        return source
    options = {key: metadata[key] for key in _TOKENIZER_ARGUMENTS if metadata.get(key) is not None}
    try:
        return _cached_tokenizer(source, tuple(sorted(options.items())))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{task}: expected a tokenizer at {source!r}, found none that loads ({_first_line(error)}): "
            "name one with tokenizer= in --model_args."
        ) from error


@lru_cache(maxsize=2)
def _cached_tokenizer(source: str, options: tuple[tuple[str, Any], ...]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source, **dict(options))


def _wikitext_pages(task: str, settings: Settings) -> Iterator[str]:
    if settings.data_path is not None:
        for document in local_corpus(settings.data_path).documents():
            yield from split_wikitext_pages(document.text)
        return
    import datasets

    try:
        pages = datasets.load_dataset("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", split="test")
    except Exception as error:  # the hub's client raises many unrelated classes when it cannot be reached
        raise UserError(
            f"{task}: expected EleutherAI/wikitext_document_level from the Hugging Face hub, found no way to load it "
            f"({_first_line(error)}): go online once, or give wikitext's raw text with "
            '--metadata \'{"data_path": "..."}\'.'
        ) from error
    for row in pages:
        yield row["page"]


def _detokenize_wikitext(page: str) -> str:
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    text: str = wikitext_detokenizer({"page": page})
    return text


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
