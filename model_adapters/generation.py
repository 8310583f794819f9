"""Generation: continues the prompts of `generate_until` up to their first stop sequences.

Prompts longer than a batch are read by all processes of a group, and the process that has the request goes on alone. A
turn reads at most one prompt of each process, so no process holds keys and values of two, and all write their answers
at the same time.
"""

import contextlib
import copy
import dataclasses
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, DynamicCache

from sbeval.errors import UserError
from sbeval.model_adapters.answers import Answers, handed_over, request_name
from sbeval.model_adapters.batching import DoesNotFit, fitting, run_in_batches
from sbeval.model_adapters.decoding import texts
from sbeval.model_adapters.decoding.growing_cache import growing_cache, steps_without_plans
from sbeval.model_adapters.decoding.schedule import Continuations
from sbeval.model_adapters.decoding.served import GenerationInSlots, end_tokens, greedy_setting, why_not_setting
from sbeval.model_adapters.decoding.stepper import ReadPrompt
from sbeval.model_adapters.decoding.texts import Continuation
from sbeval.model_adapters.decoding.thinking import Thought
from sbeval.model_adapters.self_test.measured import without_cache
from sbeval.model_adapters.self_test.outcome import WITHOUT_CACHE
from sbeval.model_adapters.session import Session, Tally
from sbeval.model_adapters.truncation import Prompt, fit_prompts, record_facts
from sbeval.scoring.context_parallel import ContextParallelScorer
from sbeval.scoring.non_finite import FiniteWatch, NonFiniteError, NoText
from sbeval.scoring.requests import Answer

_GREEDY_TOKENS = 8
_THOUGHTS_KEPT = 64
"""Prompts that are thought about before the first of them is answered, where a response cache keeps answers."""


def pad_left(prompts: Sequence[Prompt], pad_token_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns input ids and attention mask, both int64 [B, longest prompt], padded on the left."""
    tokens = [torch.from_numpy(prompt.tokens) for prompt in prompts]
    input_ids = pad_sequence(tokens, batch_first=True, padding_value=pad_token_id, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True, padding_side="left")
    return input_ids.to(device), mask.to(device)


def generate_until(session: Session, hf: Any, requests: Sequence[Instance], *, quiet: bool) -> list[str]:
    """Returns the continuation of each prompt up to its first stop sequence, behind any thinking."""
    settings = [normalize_gen_kwargs(request.args[1], hf.max_gen_toks) for request in requests]
    if session.thinking is not None and (begun := {r.task_name for r in requests if _begins_its_answer(session, r)}):
        expected = "Expected prompts that leave the answer to a model that thinks first, found such as begin it"
        remedy = "leave thinking_tokens out for them, or pass it in the metadata of tasks of this project too"
        raise UserError(f"{expected} in {', '.join(sorted(map(str, begun)))}: {remedy}.")
    encoded = texts.encode_prompts(hf, [request.args[0] for request in requests], quiet=quiet or session.quiet)
    session.check_tokens((request_name(request), [tokens]) for request, tokens in zip(requests, encoded, strict=True))
    prompts = fit_prompts(session, encoded, settings, [request.task_name for request in requests])
    arguments = dict(enumerate(request.args[:2] for request in requests))
    groups = _same_answers(prompts)
    same = {equal[0].index: equal for group in groups for equal in group}
    answers: Answers[int, str] = Answers(session, "generate_until", arguments, quiet=quiet)
    thoughts: dict[int, Thought] = {}
    with answers:
        firsts = [[equal[0] for equal in group] for group in groups]
        for first, (tokens, sound) in answers.each(_answered(session, hf, firsts, thoughts)):
            prompt, thought = prompts[first], thoughts.get(first)
            session.meter.add(len(prompt.tokens))
            text: Answer | NoText
            if sound:
                stop = texts.stop_texts(hf, prompt.setting["until"])
                text = Answer(texts.answer_text(hf.tokenizer, tokens, stop, hf.think_end_token))
            else:
                text = unsound = texts.no_text(len(prompt.tokens), len(tokens))
                if session.scorer.non_finite == "error":
                    answers.fail(unsound.error.of(request_name(requests[first])))
                    continue
            facts = {} if thought is None else {f"thinking_{k}": v for k, v in thought._asdict().items()}
            if sound and len(tokens) >= prompt.setting["max_gen_toks"] and not texts.has_end(hf, tokens, stop):
                facts["answer_cut"] = True
            for alike in same[first]:
                answer = copy.copy(text)
                answer.facts = {"cut_tokens": alike.cut_tokens, **facts}
                answers.give(alike.index, answer)
    if session.cache_hook.dbdict is None:
        tell(session, requests, answers.in_order())
    return answers.in_order()


def tell(session: Session, requests: Sequence[Instance], answers: Sequence[str]) -> None:
    """Counts answers, those of a response cache too, and has what is known of them logged with their samples."""
    tally = Tally()
    for request, answer in zip(requests, answers, strict=True):
        if (facts := getattr(answer, "facts", None)) is None:  # kept by an earlier version
            continue
        tally.add(facts)
        ends = session.tally.chat or session.thinking is not None  # base models end their answers nowhere
        record_facts(request, **facts if ends else {**facts, "answer_cut": None})
    session.tally.merge(tally)


def _begins_its_answer(session: Session, request: Instance) -> bool:
    text, doc = request.args[0], request.doc if isinstance(request.doc, dict) else {}
    prefix = doc.get("answer_prefix") or doc.get("gen_prefix")  # as RULER's documents here and in lm-eval have it
    asked_behind = prefix and "answer_prefix" not in request.args[1] and text.rstrip().endswith(str(prefix).rstrip())
    return bool(asked_behind) or hash(text) in session.begun


def _answered(
    session: Session, hf: Any, groups: Sequence[Sequence[Prompt]], thoughts: dict[int, Thought]
) -> Continuations:
    """Generates answers, behind their thinking where the model thinks; puts that into `thoughts`."""
    if (thinking := session.thinking) is None:
        yield from generated(session, hf, groups)
        return
    pieces: list[Sequence[Sequence[Prompt]]] = [groups]
    if session.cache_hook.dbdict is not None:  # it keeps what is complete
        pieces = [[group[i : i + _THOUGHTS_KEPT]] for group in groups for i in range(0, len(group), _THOUGHTS_KEPT)]
    for piece in pieces:
        asked = {prompt.index: prompt for prompt in itertools.chain(*piece)}
        before = [[dataclasses.replace(p, setting=thinking.setting(p.setting)) for p in group] for group in piece]
        ready: dict[int, Prompt] = {}
        for index, written in generated(session, hf, before):
            prompt = asked[index]
            if not written.sound:
                yield index, written
                continue
            session.meter.add(len(prompt.tokens))
            thoughts[index], tokens = thinking.ended(written.tokens, prompt.beginning, prompt.setting["until"])
            ready[index] = dataclasses.replace(prompt, tokens=np.concatenate([prompt.tokens, np.array(tokens)]))
        yield from generated(session, hf, [[ready[p.index] for p in group if p.index in ready] for group in piece])


def generated(session: Session, hf: Any, groups: Sequence[Sequence[Prompt]]) -> Continuations:
    """Continues prompts, in slots where that is possible, and yields each with its index as soon as it is complete.

    The session's meter begins before each. Prompts of one setting are in one group.
    """
    slots = GenerationInSlots(session, hf)
    if any(group and not slots.serves(group[0].setting) for group in groups):
        session.self_test.check("generation")  # before any other group takes its time

    def continued(prompts: Sequence[Prompt], read: ReadPrompt | None = None) -> Continuations:
        if not slots.serves(prompts[0].setting):
            yield from _in_batches(session, hf, prompts, read)
            return
        given = yield from slots.generate(prompts, read)
        by_setting: dict[str, list[Prompt]] = defaultdict(list)
        for prompt in prompts:
            if prompt.index not in given:  # an answer from slots was wrong
                by_setting[_setting_name(prompt)].append(prompt)
        for left in by_setting.values():
            session.self_test.check("generation")
            yield from _in_batches(session, hf, left, read)

    together: set[int] = set()
    for prompt, read in prompts_together(session, hf, [*itertools.chain(*groups)]):
        together.add(prompt.index)
        yield from continued([prompt], read)
    left = [alone for group in groups if (alone := [prompt for prompt in group if prompt.index not in together])]
    served = [group for group in left if slots.serves(group[0].setting)]
    apart = [group for group in left if not slots.serves(group[0].setting)]
    for group in ([*itertools.chain(*served)], *apart):
        if group:
            yield from continued(group)


def prompts_together(session: Session, hf: Any, prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, ReadPrompt]]:
    """Yields the long prompts of this process, each with what reads it; helps to read those of other processes.

    That function is to be called once before the next request: it reads all of the prompt but its last token.

    Raises:
        DoesNotFit: memory ran out.
    """
    scorer = session.scorer
    if not isinstance(scorer, ContextParallelScorer):
        return
    least = session.own_batches.max_tokens or 0
    long = [p for p in prompts if len(p.tokens) > least and _can_be_shared(hf.model, p.setting)]
    long.sort(key=lambda prompt: -prompt.length_tokens)
    everyone: list[list[int]] = scorer.context.gather_objects([prompt.length_tokens for prompt in long])
    for place in range(max(map(len, everyone))):
        asked = [(rank, lengths[place]) for rank, lengths in enumerate(everyone) if place < len(lengths)]
        turn = _Turn(session, scorer, asked)
        if place < len(long):
            yield long[place], turn
        else:
            turn()


class _Turn:
    """Reads a prompt of each rank in `asked`, beside its tokens and the answer's; all processes must call it once."""

    def __init__(self, session: Session, scorer: ContextParallelScorer, asked: Sequence[tuple[int, int]]) -> None:
        self._session, self._scorer, self._asked = session, scorer, asked
        self._over = False

    def __call__(self, ids_1L: Tensor | None = None, cache: Cache | None = None) -> None:
        session, context = self._session, self._scorer.context
        if self._over:  # this process alone tries again, since its memory ran out
            raise DoesNotFit(self._does_not_fit(dict(self._asked)[context.rank]))
        for rank, length_tokens in self._asked:
            with fitting(self._does_not_fit(length_tokens)):
                mine = rank == context.rank
                ids = context.from_rank(rank, ids_1L.cpu() if mine and ids_1L is not None else None)
                with session.autocast(), session.rope.hold(length_tokens):
                    self._scorer.read_together(ids.to(session.device), rank, cache if mine else None)
        self._over = True

    def _does_not_fit(self, length_tokens: int) -> str:
        return (
            f"Expected a prompt and an answer of {length_tokens} tokens to fit into the memory of "
            f"{self._scorer.context.ranks} processes, one of which holds all keys and values, but it ran out: use a "
            "larger context_parallel, a shorter length or dtype=bfloat16."
        )


def _can_be_shared(model: Any, setting: Mapping[str, Any]) -> bool:
    """Whether an answer is a single text that can continue from keys and values read before."""
    own_cache = getattr(model.generation_config, "cache_implementation", None)
    return own_cache is None and why_not_setting(model, {**setting, "do_sample": False}) is None


def _in_batches(session: Session, hf: Any, prompts: Sequence[Prompt], read: ReadPrompt | None) -> Continuations:
    def run(batch: Sequence[Prompt]) -> list[Continuation]:
        session.meter.begin()
        with session.rope.hold(batch[0].length_tokens):
            return _generate(session, hf, batch, read)

    longest_first, begun = sorted(prompts, key=lambda prompt: -prompt.length_tokens), 0
    while begun < len(longest_first):  # anew where a batch was wrong, and its prompts are run in another way
        limits = session.real.limits(session.generation_batches, "generation")
        for batch, continuations in run_in_batches(
            longest_first[begun:], run, length_tokens=lambda prompt: prompt.length_tokens, limits=limits
        ):
            if not _stand(session, hf, batch, continuations):
                session.self_test.check("generation")
                break
            begun += len(batch)
            yield from handed_over(zip([prompt.index for prompt in batch], continuations, strict=True))


def _stand(session: Session, hf: Any, batch: Sequence[Prompt], continuations: Sequence[Continuation]) -> bool:
    """Whether answers of a batch are those of whole texts, as far as they are read again.

    Where tokens are sampled or searched, the first tokens after the same prompts are generated greedily and compared.
    """
    length = batch[0].length_tokens
    padded = len({len(prompt.tokens) for prompt in batch}) > 1
    if not session.real.wants_answers(rows=len(batch), length=length, padded=padded):
        return True
    setting = greedy_setting(batch[0].setting)
    with session.rope.hold(length):
        if why_not_setting(hf.model, setting) is not None:
            setting = {"until": [], "max_gen_toks": min(_GREEDY_TOKENS, setting["max_gen_toks"]), "num_beams": 1}
            if why_not_setting(hf.model, greedy_setting(setting)) is not None:
                return True  # the model's generation config changes what is chosen
            prompts = [dataclasses.replace(prompt, setting={**setting, "do_sample": False}) for prompt in batch]
            continuations = _generate(session, hf, prompts, None)
        if not all(continuation.sound for continuation in continuations):
            return True
        stands = session.real.answers_stand(
            [(prompt.tokens, written.tokens) for prompt, written in zip(batch, continuations, strict=True)],
            length=length,
            not_early=end_tokens(hf.model),
            fewest=setting.get("min_new_tokens") or 0,
        )
    session.meter.begin()
    return stands


def _generate(session: Session, hf: Any, prompts: Sequence[Prompt], read: ReadPrompt | None) -> list[Continuation]:
    kwargs = dict(prompts[0].setting)
    stop = texts.stop_texts(hf, kwargs.pop("until"))
    budget = kwargs.pop("max_gen_toks")
    input_ids, mask = pad_left(prompts, hf.tokenizer.pad_token_id, session.device)
    caches = session.self_test.generation != WITHOUT_CACHE
    if caches and kwargs.get("past_key_values") is None:
        cache = growing_cache(hf.model, kwargs.get("cache_implementation"))
        if read is not None:
            cache = DynamicCache(config=hf.model.config) if cache is None else cache
            read(input_ids[:, :-1], cache)
        kwargs |= {} if cache is None else {"past_key_values": cache}
    longest = kwargs.pop("max_length", input_ids.shape[1] + budget)
    watch = FiniteWatch(len(prompts), session.device)
    kwargs |= watch.arguments()
    try:
        with steps_without_plans(hf.model), contextlib.nullcontext() if caches else without_cache(hf.model):
            output = hf._model_generate(context=input_ids, attention_mask=mask, stop=stop, max_length=longest, **kwargs)
    except ValueError as error:
        if "`model_kwargs` are not used" not in str(error):
            raise
        remedy = "correct them in --gen_kwargs or the task"
        raise UserError(f"Expected generation arguments that transformers knows, but {error}: {remedy}.") from error
    ends = kwargs.get("eos_token_id", hf.model.generation_config.eos_token_id)
    continuations = [texts.up_to_end(tokens, ends) for tokens in output[:, input_ids.shape[1] :].tolist()]
    sound = [True] * len(prompts)
    for row, first in enumerate(watch.first_tokens(len(prompts))):
        before = continuations[row][: first - input_ids.shape[1]] if first else continuations[row]
        # what a row writes after its own answer is complete does not count
        if len(before) < len(continuations[row]) and not any(text in hf.tokenizer.decode(before) for text in stop):
            continuations[row], sound[row] = before, False
    return [*map(Continuation, continuations, sound)]


def check_batch(watch: FiniteWatch, decoded: Sequence[list[int]], ends: int | Sequence[int] | None) -> None:
    """Checks what an encoder-decoder model generated under a watch: rows from the token that begins every answer.

    Raises:
        NonFiniteError: logits were NaN or infinite before an answer was complete.
    """
    for tokens, first in zip(decoded, watch.first_tokens(len(decoded)), strict=True):
        if first is not None and first - 1 < len(texts.up_to_end(tokens[1:], ends)):
            raise NonFiniteError(f"Expected finite logits, found NaN or infinity for token {first} of an answer")


def _same_answers(prompts: Sequence[Prompt]) -> list[list[list[Prompt]]]:
    """Returns prompts by their setting; those with the same answer are together.

    Equal prompts have equal greedy continuations; every sampled continuation is drawn anew.
    """
    groups: dict[str, dict[object, list[Prompt]]] = defaultdict(lambda: defaultdict(list))
    for prompt in prompts:
        once = prompt.index if prompt.setting.get("do_sample") else (prompt.tokens.tobytes(), prompt.beginning)
        groups[_setting_name(prompt)][once].append(prompt)
    return [[*group.values()] for group in groups.values()]


def _setting_name(prompt: Prompt) -> str:
    return json.dumps(prompt.setting, sort_keys=True, default=str)
