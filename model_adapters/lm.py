"""The lm-eval model `sb`: runs this project's models, and any Hugging Face causal language model as `hf` does.

The constructor calls `open`, which returns an `Opened`, `prepare`, which returns a `Prepared`, and `begin`, which
returns a `Session`. The packages `score` and `generate` answer requests with the session. An encoder-decoder model has
no session and runs as it does in `hf`.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from sbeval.corpora.tokenizers import special_beginnings
from sbeval.errors import UserError
from sbeval.model_adapters.answers import check_scores
from sbeval.model_adapters.chat_templates import limited
from sbeval.model_adapters.encoding import encode_texts
from sbeval.model_adapters.generate import requests as generate
from sbeval.model_adapters.generate.batches import check_batch
from sbeval.model_adapters.open.hf import OpeningLM
from sbeval.model_adapters.prepare.prepared import prepare
from sbeval.model_adapters.record import check_cache, model_record
from sbeval.model_adapters.score import requests as score
from sbeval.model_adapters.self_test.testing import begin
from sbeval.model_adapters.session import Session
from sbeval.scoring.non_finite import FiniteWatch
from sbeval.scoring.requests import ATTENTION_SPAN, TARGET_LOGPROBS, TOKEN_LOGPROBS, TargetLogprobs, TokenLogprobs


class StickBreakingLM(OpeningLM):
    """lm-eval's `hf` with this project's scoring and generation, and with the request types of its tasks.

    Takes all arguments of `hf` and those of `AdapterOptions`.

    Attributes:
        opened: the loaded model, its tokenizer and the arguments.
        prepared: the changes to the loaded model that stayed, and notes on those that were undone.
        session: the prepared model with everything that requests need; None for an encoder-decoder model.
    """

    session: Session | None = None
    _encoded: Mapping[str, list[int]] | None = None

    def __init__(self, pretrained: Any, **kwargs: Any) -> None:
        self.opened = self.open(pretrained, **kwargs)
        self.prepared = prepare(self.opened.model, self.opened.tokenizer, self.opened.setting())
        self.session = begin(self.opened, self.prepared)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Returns each continuation's log-likelihood in nats, and whether all its tokens are the most probable ones."""
        if self.session is None:
            scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
            check_scores(requests, [total for total, _ in scores])
            return scores
        self.session.self_test.check("scoring")
        self._encode_together([request.args for request in requests], quiet=disable_tqdm or self.session.quiet)
        try:
            pairs = super().loglikelihood(requests, disable_tqdm=disable_tqdm)  # calls `_loglikelihood_tokens` below
        finally:
            self._encoded = None
        return score.loglikelihood(self.session, requests, pairs, quiet=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of each text in nats, computed in the same windows as in `hf`."""
        if self.session is None:
            scores: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
            check_scores(requests, scores)
            return scores
        self.session.self_test.check("scoring")
        texts = [self.tok_encode(request.args[0]) for request in requests]
        lead_in = self.prefix_token_id
        return score.loglikelihood_rolling(self.session, requests, texts, lead_in=lead_in, quiet=disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the continuation of each prompt up to its first stop sequence."""
        if self.session is None:
            texts: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm)
            return texts
        return generate.generate_until(self.session, requests, quiet=disable_tqdm)

    def token_logprobs(self, requests: list[Instance], disable_tqdm: bool = False) -> list[TokenLogprobs]:
        """Answers each `TokenLogprobsRequest` with the log-probabilities of the last `scored` tokens of its window."""
        return score.token_logprobs(self._causal(TOKEN_LOGPROBS), requests, quiet=disable_tqdm)

    def target_logprobs(self, requests: list[Instance], disable_tqdm: bool = False) -> list[TargetLogprobs]:
        """Answers each `TargetLogprobsRequest` with the log-probabilities of the targets that it names."""
        return score.target_logprobs(self._causal(TARGET_LOGPROBS), requests, quiet=disable_tqdm)

    def attention_span(self, requests: list[Instance], disable_tqdm: bool = False) -> list[list[list[Any]]]:
        """Answers each `AttentionSpanRequest` with the effective attention spans of every layer and head."""
        return score.attention_span(self._causal(ATTENTION_SPAN), requests, quiet=disable_tqdm)

    def count_answers(self, requests: list[Instance], answers: list[str]) -> None:
        """Counts the answers of `generate_until`, including those that lm-eval took from its response cache."""
        if self.session is not None:
            generate.count_answers(self.session, requests, answers)

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Sets lm-eval's response cache, and raises a `UserError` if the cache was made with other settings."""
        if self.session is not None:
            if cache_hook.dbdict is not None:
                check_cache(cache_hook.dbdict, self.session)
            self.session = self.session.with_cache(cache_hook)
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """Returns the model info of `hf`, with the `ModelRecord` of this run as the entry "sbeval"."""
        record = model_record(self.opened, self.prepared, self.session)
        return {**super().get_model_info(), "sbeval": record.to_json()}

    chat_template = limited(HFLM.chat_template)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Renders the chat template for these messages, and records that this prompt comes from the template."""
        text: str = limited(HFLM.apply_chat_template)(self, chat_history, add_generation_prompt)
        if self.session is not None:
            self.session.note_chat(text, begins_answer=not add_generation_prompt)
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Returns the tokens of a text as `hf` does, but without a suffix such as EOS if more text follows.

        Texts that `_encode_together` has tokenized before are looked up.
        """
        if add_special_tokens is None and not kwargs and self._encoded is not None and string in self._encoded:
            return list(self._encoded[string])
        if add_special_tokens is None and string.startswith(special_beginnings(self.tokenizer)):
            add_special_tokens = False
        return list(super().tok_encode(string, add_special_tokens=add_special_tokens, **kwargs))

    def _encode_together(self, pairs: Sequence[tuple[str, str]], *, quiet: bool) -> None:
        """Tokenizes all contexts, with and without their continuations, in batches; `hf` does so one by one."""
        context_pairs = [(context.rstrip(), context + continuation) for context, continuation in pairs if context]
        texts = list(dict.fromkeys(itertools.chain(*context_pairs)))
        beginnings = (self.tokenizer.decode(self.prefix_token_id),) if texts else ()
        tokens = encode_texts(self.opened, texts, beginnings=tuple(filter(None, beginnings)), quiet=quiet)
        self._encoded = dict(zip(texts, tokens, strict=True))

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        context_tokens, continuation_tokens = super()._encode_pair(context, continuation)
        if (
            self.session is not None and not context_tokens
        ):  # the context has no tokens: it is white space, and the tokenizer adds no prefix
            context_tokens = [self.prefix_token_id]
        return context_tokens, continuation_tokens

    def _loglikelihood_tokens(self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any) -> Any:
        # `hf` calls this with tokenized requests and returns its result: `loglikelihood` above passes them to `score`
        if self.session is None:
            return super()._loglikelihood_tokens(requests, **kwargs)
        return [(context, continuation) for _, context, continuation in requests]

    def _model_generate(self, context: Tensor, *args: Any, **kwargs: Any) -> Any:
        # `hf` calls this only for encoder-decoder models; `generate` calls the model itself
        watch = FiniteWatch(len(context), context.device)
        output = super()._model_generate(context, *args, **kwargs, **watch.arguments())
        check_batch(watch, output.tolist(), self.model.generation_config.eos_token_id)
        return output

    def _causal(self, request_type: str) -> Session:
        if self.session is None:
            raise UserError(f"Expected a causal language model for {request_type}, found an encoder-decoder model.")
        self.session.self_test.check("scoring")
        return self.session
