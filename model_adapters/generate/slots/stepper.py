"""A model with a static KV cache of slots, one row for each text: prefills, and decode steps that add a token to each.

With prompt lookup decoding, a step reads several tokens of each text at once: the newest token, and draft tokens. The
drafts are the tokens after the previous place in the text that holds the same two tokens as its end. The step accepts
the drafts that the model would choose and adds one token more, so answers stay the same. Keys of rejected drafts are
overwritten.

Everything that a step needs is on the device: the newest tokens, their number, and which slots are still generating. So
a step can be captured as a CUDA graph and replayed; the host only reads the new tokens from time to time (a "look").
A slot without a text takes part in every step and attends to no keys.

Shape suffixes: B slots, N prompts, T tokens that a step reads for each text, R room for a text, V vocabulary, W largest
number of new tokens, M largest number of tokens since the last look.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from sbeval.model_adapters.generate.slots.fused_blocks import FusedBlocks
from sbeval.model_adapters.generate.slots.graph_capture import GraphCapture
from sbeval.model_adapters.generate.slots.transformers_attention import attending_to
from sbeval.models import SbevalForCausalLM
from sbeval.models.rope import RopeFrequencies
from sbeval.models.slots import SlotCache
from sbeval.scoring.body import cache_argument
from sbeval.scoring.non_finite import NEVER, FiniteWatch

ReadPrompt = Callable[[Tensor, Cache], None]
"""A function that prefills a prompt, int64 [1, L], into a cache, in place of the model's own forward."""


def sliding_windows(model: Any) -> list[int | None] | None:
    """Returns the sliding window of every layer, None for a layer without one.

    Returns None for the whole model if a layer caches something other than keys and values.
    """
    try:
        layers = DynamicCache(config=model.config).layers
        config = model.config.get_text_config()
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    # transformers caches attention chunks like sliding windows, but the first token of a chunk sees no token before it
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return None
    if not layers or any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        return None
    return [getattr(layer, "sliding_window", None) for layer in layers]


class Written:
    """The tokens of all slots since the host last looked, while they are copied to the host."""

    def __init__(self, written_BM: Tensor, count_B: Tensor, is_active_B: Tensor, watch: FiniteWatch) -> None:
        columns = (count_B, is_active_B, watch.first_B)
        whole = torch.cat([written_BM, *(column[:, None] for column in columns)], dim=1)
        self._arrived: torch.cuda.Event | None = None
        self._table: list[list[int]] | None = None
        self._whole = whole
        if whole.is_cuda:
            self._whole = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True).copy_(whole, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(whole.device))

    def of(self, slot: int) -> tuple[list[int], bool, int | None]:
        """Waits for the device, and returns the new tokens of a slot, whether its text goes on, and a third value.

        The third value is the number of answer tokens before the first NaN or infinite logits, None if there were none.
        """
        if self._table is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._table = self._whole.tolist()
        *tokens, count, goes_on, first = self._table[slot]
        return tokens[:count], bool(goes_on), None if first == NEVER else first


class Stepper:
    """Greedy generation in slots with a causal language model, either of this project or of transformers.

    Args:
        model: the model.
        slots: the number of slots.
        room_tokens: the largest number of tokens of a prompt with its answer.
        most_new_tokens: the largest number of tokens of an answer.
        end_tokens: tokens that end an answer.
        not_early: tokens that are not chosen before an answer has its least number of tokens (`fewest_tokens`).
        fused: the model's fused blocks, for a single slot without drafts; None to call the model's own forward.
        drafts: the largest number of draft tokens in a step, for a model of this project without sliding windows.
        read: prefills prompts, one at a time and without chunks; None to call the model's own forward.
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        room_tokens: int,
        most_new_tokens: int,
        end_tokens: Sequence[int] = (),
        not_early: Sequence[int] = (),
        fused: FusedBlocks | None = None,
        drafts: int = 0,
        read: ReadPrompt | None = None,
    ) -> None:
        windows = sliding_windows(model)
        assert windows is not None
        device = model.device
        self._model, self._fused, self._drafts = model, fused, drafts
        self._cache_argument = cache_argument(model)
        self._read = read
        room_tokens += drafts  # the last step may verify tokens beyond the end of the answer
        self.cache = SlotCache(slots=slots, room_tokens=room_tokens, sliding_windows=windows, device=device)
        # the texts so far, in which drafts are looked up; slots that are done write into a spare last column
        self._text_BR = torch.zeros(slots, room_tokens + 1 if drafts else 0, dtype=torch.int64, device=device)
        integers: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self._ends, self._not_early = (torch.tensor(sorted(set(each)), **integers) for each in (end_tokens, not_early))
        self._token_B1 = torch.zeros(slots, 1, **integers)
        self._is_active_B = torch.zeros(slots, dtype=torch.bool, device=device)
        # `_looked_B` is the number of tokens at the last look
        self._count_B, self._budget_B, self._fewest_B, self._looked_B = (
            torch.zeros(slots, **integers) for _ in range(4)
        )
        self._steps_since_look = 0
        # slots that are done write into a spare last column
        self._written_BW = torch.zeros(slots, most_new_tokens + 1, dtype=torch.int64, device=device)
        self._watch = FiniteWatch(slots, device)
        self._rope = _rope(model)
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def start(
        self,
        slots: Sequence[int],
        prompts: Sequence[NDArray[np.int64]],
        budgets_tokens: Sequence[int],
        *,
        fewest_tokens: Sequence[int] | None = None,
        answered_tokens: Sequence[int] | None = None,
        chunk_tokens: int | None = None,
    ) -> None:
        """Prefills one prompt of at least one token into each of `slots`. If memory runs out, all of them stay free.

        The prefill reads all tokens of a prompt but the last. The next decode step reads the last one and chooses the
        first token of the answer.

        Args:
            slots: free slots, one for each prompt.
            prompts: the tokens of each prompt.
            budgets_tokens: for each prompt, the largest number of answer tokens.
            fewest_tokens: for each prompt, the number of answer tokens before which `not_early` tokens are not chosen.
            answered_tokens: for each prompt, how many of its last tokens already belong to the answer.
            chunk_tokens: the size of the chunks in which a prompt is read; None to read it as a whole.
        """
        device = self._token_B1.device
        longest = max(len(prompt) for prompt in prompts) - 1
        input_ids = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            input_ids[row, : len(prompt) - 1] = prompt[:-1]
        none = [0] * len(prompts)
        columns = [
            [len(prompt) - 1 for prompt in prompts],
            [int(prompt[-1]) for prompt in prompts],
            budgets_tokens,
            fewest_tokens or none,
            answered_tokens or none,
        ]
        length_N, last_N, budget_N, fewest_N, answered_N = torch.tensor(columns, dtype=torch.int64).to(device)
        slots_N = torch.tensor(slots, dtype=torch.int64, device=device)
        ids_NL = torch.from_numpy(input_ids).to(device)
        self.cache.clear(slots_N)
        if self._read is not None:
            chunk_tokens = None
        for begin in range(0, longest, chunk_tokens or max(1, longest)):
            chunk = ids_NL[:, begin : begin + (chunk_tokens or longest)]
            with self.cache.fill(slots_N, length_N, begin):
                if self._read is None:
                    body = self._model.base_model
                    body(input_ids=chunk, use_cache=True, **{cache_argument(body): self.cache})
                else:
                    self._read(chunk, self.cache)
        if self._drafts:
            texts = np.stack([np.append(row, 0) for row in input_ids])
            texts[range(len(prompts)), [len(prompt) - 1 for prompt in prompts]] = [prompt[-1] for prompt in prompts]
            self._text_BR[slots_N, : longest + 1] = torch.from_numpy(texts).to(device)
        self.cache.position_B[slots_N] = length_N.int()
        self._token_B1[slots_N, 0] = last_N
        self._budget_B[slots_N] = budget_N
        self._fewest_B[slots_N] = fewest_N
        self._count_B[slots_N] = answered_N
        self._looked_B[slots_N] = answered_N
        self._watch.begin(slots_N)
        self._is_active_B[slots_N] = True

    @torch.no_grad()
    def run(self, steps: int) -> None:
        """Runs decode steps. Each step adds one or more tokens to every text that is not complete."""
        self._steps_since_look += steps
        if self._graph is not None:
            for _ in range(steps):
                self._graph.replay()
            return
        with attending_to(self.cache, self._model):
            for _ in range(steps):
                self._step()

    def written(self) -> Written:
        """Starts to copy the tokens since the last call to the host, and returns without waiting for the device."""
        unused = self._written_BW.shape[1] - 1
        most = min(unused, self._steps_since_look * (1 + self._drafts))
        place_BM = self._looked_B[:, None] + torch.arange(most, device=self._looked_B.device)
        new_BM = self._written_BW.gather(1, place_BM.clamp_max(unused))
        written = Written(new_BM, self._count_B - self._looked_B, self._is_active_B, self._watch)
        self._looked_B.copy_(self._count_B)
        self._steps_since_look = 0
        return written

    def drop(self, slot: int) -> None:
        """Ends the text in a slot before it has used up its budget, for example at a stop sequence."""
        self._is_active_B[slot] = False
        self.cache.position_B[slot] = 0

    @torch.no_grad()
    def capture(self, graph_capture: GraphCapture) -> None:
        """Captures a decode step as a CUDA graph; call it while all slots are free, so that it changes no text."""
        if graph_capture.possible:
            with attending_to(self.cache, self._model):
                self._graph = graph_capture.graph_of(self._whole_step, self._token_B1.device)

    @torch.no_grad()
    def try_step(self) -> Tensor:
        """Runs the forward pass of the next step, and returns its logits [B, V] in fp32 without choosing a token."""
        with attending_to(self.cache, self._model):
            return self._logits(self._token_B1)[:, 0]

    def _logits(self, token_BT: Tensor) -> Tensor:
        """Returns the logits [B, T, V] in fp32 after each of T tokens: the newest token of each text and its drafts."""
        new = token_BT.shape[1]
        self.cache.begin_step(new)
        if self._fused is not None:
            return self._fused.logits(token_BT, self.cache, self._rope).float()[:, None]
        rope = {} if self._rope is None else {"rope_frequencies": self._rope}
        position_BT = self.cache.position_B[:, None].long() + torch.arange(new, device=token_BT.device)
        caching = {self._cache_argument: self.cache, "use_cache": True}
        logits_BTV: Tensor = self._model(input_ids=token_BT, position_ids=position_BT, **caching, **rope).logits.float()
        return logits_BTV

    def _looked_up(self) -> Tensor:
        """Returns drafts [B, drafts]: the tokens after the previous place in the text with the same newest two tokens.

        If there is no such place, the drafts are arbitrary tokens. The step verifies drafts in either case.
        """
        position_B1 = self.cache.position_B[:, None].long()
        before_B1 = self._text_BR.gather(1, (position_B1 - 1).clamp_min(0))
        place_R = torch.arange(self._text_BR.shape[1], device=position_B1.device)
        same_BR = (self._text_BR[:, :-1] == before_B1) & (self._text_BR[:, 1:] == self._token_B1)
        same_BR &= place_R[:-1] < position_B1 - 1
        start_B1 = torch.where(same_BR, place_R[:-1], 0).amax(1, keepdim=True) + 2
        return self._text_BR.gather(1, (start_B1 + place_R[: self._drafts]).clamp_max(len(place_R) - 1))

    def _step(self) -> None:
        token_BT = self._token_B1
        if self._drafts:
            token_BT = torch.cat([token_BT, self._looked_up()], dim=1)
        logits_BTV = self._logits(token_BT)
        taken_B = self._is_active_B.clone()
        for place in range(token_BT.shape[1]):
            if place:
                taken_B = taken_B & self._is_active_B & (self._token_B1[:, 0] == token_BT[:, place])
            self._take(logits_BTV[:, place], taken_B)
        self.cache.position_B.mul_(self._is_active_B)

    def _whole_step(self) -> None:
        """Runs a step; if it raises, restores the cache so that no tensor of the step stays referenced."""
        lengths = self.cache.lengths_B, self.cache.length_B
        try:
            self._step()
        except BaseException:
            self.cache.lengths_B, self.cache.length_B = lengths
            raise

    def _take(self, logits_BV: Tensor, taken_B: Tensor) -> None:
        """Adds the most probable token to the texts that `taken_B` marks."""
        none_B = self._watch.note(logits_BV, self._count_B, taken_B)
        if len(self._not_early):
            early_B1 = (self._count_B < self._fewest_B)[:, None]
            logits_BV[:, self._not_early] = logits_BV[:, self._not_early].masked_fill(early_B1, -torch.inf)
        chosen_B1 = logits_BV.argmax(-1, keepdim=True)
        place_B = torch.where(taken_B, self._count_B, self._written_BW.shape[1] - 1)
        self._written_BW.scatter_(1, place_B[:, None], chosen_B1)
        self._count_B += taken_B
        self.cache.position_B += taken_B
        if self._drafts:
            place_B = torch.where(taken_B, self.cache.position_B, self._text_BR.shape[1] - 1)
            self._text_BR.scatter_(1, place_B[:, None].long(), chosen_B1)
        ended_B = (chosen_B1 == self._ends).any(-1) & taken_B
        self._is_active_B &= ~(ended_B | none_B) & (self._count_B < self._budget_B)
        self._token_B1.copy_(torch.where(taken_B[:, None], chosen_B1, self._token_B1))


def _rope(model: Any) -> RopeFrequencies | None:
    """Returns the RoPE frequencies of a model of this project, on its device; None for other models or without RoPE."""
    if not isinstance(model, SbevalForCausalLM) or model.config.rope_parameters is None:
        return None
    # any length would do: if frequencies depend on the length, `setting_rope_frequencies` are those of the request
    frequencies = model.model.setting_rope_frequencies or model.model.rope_frequencies_for(1)
    return RopeFrequencies(frequencies.inv_freq.to(model.device), frequencies.attention_factor)
