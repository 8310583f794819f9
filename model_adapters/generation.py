"""Generation: prompts of `generate_until` in, text up to the first stop sequence out."""

import functools
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from torch import Tensor
from tqdm import tqdm

from sbeval.errors import UserError
from sbeval.model_adapters.batching import run_in_batches
from sbeval.model_adapters.probing import ProbingLM
from sbeval.model_adapters.speed.decoding import steps_without_plans
from sbeval.model_adapters.speed.growing_cache import growing_cache
from sbeval.model_adapters.truncation import Prompt, fit_prompts, record_cut


def encode_prompt(tokenizer: Any, text: str, *, add_bos_token: bool | None, prefix_token_id: int) -> list[int]:
    """Returns a prompt's tokens: BOS as the tokenizer or `add_bos_token` has it, unless the text holds it already."""
    options: dict[str, bool] = {}
    if has_bos_prefix(text, getattr(tokenizer, "bos_token", None)):
        options = {"add_special_tokens": False}
    elif add_bos_token is not None:
        options = {"add_special_tokens": add_bos_token}
    tokens: list[int] = tokenizer(text, **options)["input_ids"]
    return tokens or [prefix_token_id]


def pad_left(prompts: Sequence[Prompt], pad_token_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns input ids and attention mask, both int64 [B, longest prompt], padded on the left."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    input_ids = np.full((len(prompts), longest), pad_token_id, dtype=np.int64)
    mask = np.zeros((len(prompts), longest), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt.tokens) :] = prompt.tokens
        mask[row, longest - len(prompt.tokens) :] = 1
    return torch.from_numpy(input_ids).to(device), torch.from_numpy(mask).to(device)


def up_to_end(tokens: list[int], ends: int | Sequence[int] | None) -> list[int]:
    """Returns a row of generated tokens without the padding that fills it while other rows of its batch go on.

    Args:
        tokens: what was generated.
        ends: the tokens that end an answer; the first of them is kept.
    """
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    first = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: first + 1]


def answer_text(tokenizer: Any, tokens: list[int], stop: list[str], think_end_token: str | int | None) -> str:
    """Returns the text of a continuation up to its first stop sequence, without what a model thinks before it.

    Args:
        tokenizer: decodes the tokens; special tokens are left out.
        tokens: what the model generated.
        stop: stop sequences.
        think_end_token: where thinking ends, as text or as a token id; None where the model does not think.
    """
    thinks = isinstance(think_end_token, int)
    if thinks and think_end_token in tokens:
        tokens = tokens[len(tokens) - tokens[::-1].index(think_end_token) :]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    answer: str = postprocess_generated_text(
        generation=text.lstrip() if thinks else text,
        stop=stop,
        think_end_token=think_end_token if isinstance(think_end_token, str) else None,
    )
    return answer


class GeneratingLM(ProbingLM):
    """The request type that generates."""

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the continuation of each prompt up to its first stop sequence."""
        if self.backend != "causal":
            texts: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm)
            return texts
        settings = [normalize_gen_kwargs(request.args[1], self.max_gen_toks) for request in requests]
        quiet = disable_tqdm or self.rank != 0
        prompts = fit_prompts(
            [self._encode_prompt(r.args[0]) for r in tqdm(requests, desc="Tokenizing prompts", disable=quiet)],
            [setting["max_gen_toks"] for setting in settings],
            [request.task_name for request in requests],
            max_length=self.max_length,
            truncation=self.options.truncation,
        )
        lengths = [len(prompt.tokens) + prompt.budget_tokens for prompt in prompts]
        self._check_positions(max(lengths, default=0))
        results: dict[int, str] = {}
        progress = self._progress(len(requests), "generate_until", disable_tqdm)

        def run(batch: Sequence[int], same: Mapping[int, Sequence[int]]) -> None:
            started = time.perf_counter()
            with self.rope.hold(lengths[batch[0]]):
                texts = self._generate([prompts[index] for index in batch], settings[batch[0]])
            self.meter.add(sum(len(prompts[index].tokens) for index in batch), time.perf_counter() - started)
            for first, text in zip(batch, texts, strict=True):
                for index in same[first]:
                    results[index] = text
                    self.cache_hook.add_partial("generate_until", requests[index].args[:2], text)
                    record_cut(requests[index], prompts[index].cut_tokens)
                    progress.update(1)

        for same in _same_answers(prompts, settings):
            run_in_batches(
                sorted(same, key=lambda index: -lengths[index]),
                functools.partial(run, same=same),
                length_tokens=lambda index: lengths[index],
                max_rows=self._max_rows,
                max_tokens=self._max_tokens,
                same_length=self.rope.by_length,
            )
        progress.close()
        return [results[index] for index in range(len(requests))]

    def _encode_prompt(self, text: str) -> list[int]:
        return encode_prompt(
            self.tokenizer, text, add_bos_token=self.add_bos_token, prefix_token_id=self.prefix_token_id
        )

    def _generate(self, prompts: Sequence[Prompt], setting: Any) -> list[str]:
        kwargs = dict(setting)
        end = self.eot_token_id
        eos = None if end is None else self.tok_decode(end, skip_special_tokens=False)
        stop = handle_stop_sequences(_stop_sequences(kwargs.pop("until")), eos=eos)
        budget = kwargs.pop("max_gen_toks")
        input_ids, mask = pad_left(prompts, self.tokenizer.pad_token_id, self.device)
        if kwargs.get("past_key_values") is None:
            cache = growing_cache(self.model, kwargs.get("cache_implementation"))
            kwargs |= {} if cache is None else {"past_key_values": cache}
        longest = kwargs.pop("max_length", input_ids.shape[1] + budget)
        try:
            with steps_without_plans(self.model):
                output = self._model_generate(
                    context=input_ids, attention_mask=mask, stop=stop, max_length=longest, **kwargs
                )
        except ValueError as error:
            if "`model_kwargs` are not used" not in str(error):
                raise
            raise UserError(
                f"Expected generation arguments that transformers knows, but {error}: correct them in --gen_kwargs or "
                "the task."
            ) from error
        ends = kwargs.get("eos_token_id", self.model.generation_config.eos_token_id)
        continuations = [up_to_end(tokens, ends) for tokens in output[:, input_ids.shape[1] :].tolist()]
        return [answer_text(self.tokenizer, tokens, stop, self.think_end_token) for tokens in continuations]


def _stop_sequences(until: Sequence[Any]) -> list[str]:
    """Returns the texts among stop sequences; null, alone or in the list, is none.

    Raises:
        UserError: one is neither.
    """
    given = [text for text in until if text is not None]
    for text in given:
        if not isinstance(text, str):
            raise UserError(
                f"Expected until to be text, a list of texts or null, found {text!r} in it: put it in quotes in "
                "--gen_kwargs or the task."
            )
    return given


def _same_answers(prompts: Sequence[Prompt], settings: Sequence[Any]) -> Iterable[Mapping[int, Sequence[int]]]:
    """Returns, for each setting, the requests to run and with each of them those that have the same answer.

    The same prompt has the same greedy continuation; each sample is one of its own.
    """
    groups: dict[str, dict[object, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, (prompt, setting) in enumerate(zip(prompts, settings, strict=True)):
        once = index if setting.get("do_sample") else prompt.tokens.tobytes()
        groups[json.dumps(setting, sort_keys=True, default=str)][once].append(index)
    return [{indices[0]: indices for indices in group.values()} for group in groups.values()]
