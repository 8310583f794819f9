"""A model and the slots that it generates in: prompts are prefilled into free slots, and a step adds a token to each.

With draft tokens (prompt lookup decoding), a step verifies several tokens of each text at once: the newest token, and
drafts, which are the tokens that followed the newest two where they last stood in the text. It adds the drafts that the
model would choose and one token more, so answers stay the same. Keys of refused drafts are overwritten.

Everything that a step needs is on the device: the newest tokens, their number, and which slots go on. So a step can be
captured as a CUDA graph and replayed; the host only reads the new tokens from time to time. A slot without a text takes
part in every step and attends to nothing.

Shape suffixes: B slots, N prompts, T tokens verified in a step, R room for a text, V vocabulary, W most new tokens, M
most tokens since the last look.
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
from sbeval.scoring.non_finite import NEVER, FiniteWatch

ReadPrompt = Callable[[Tensor, Cache], None]
"""Prefills a prompt's tokens, int64 [1, L], into a cache in place of the model."""


def sliding_windows(model: Any) -> list[int | None] | None:
    """Returns each layer's window, None for layers without one; None if a layer caches more than keys and values."""
    try:
        layers = DynamicCache(config=model.config).layers
        config = model.config.get_text_config()
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    # transformers caches chunks like windows, but a chunk's first token does not see the token before it
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return None
    if not layers or any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        return None
    return [getattr(layer, "sliding_window", None) for layer in layers]


class Written:
    """The tokens that were generated since the last look, on their way to the host."""

    def __init__(self, written_BM: Tensor, count_B: Tensor, goes_on_B: Tensor, watch: FiniteWatch) -> None:
        columns = (count_B, goes_on_B, watch.first_B)
        whole = torch.cat([written_BM, *(column[:, None] for column in columns)], dim=1)
        self._arrived: torch.cuda.Event | None = None
        self._table: list[list[int]] | None = None
        self._whole = whole
        if whole.is_cuda:
            self._whole = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True).copy_(whole, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(whole.device))

    def of(self, slot: int) -> tuple[list[int], bool, int | None]:
        """Returns a slot's new tokens, whether its text goes on, and how many tokens precede NaN or infinite logits.

        The last value is None if all logits were finite. Waits for the device.
        """
        if self._table is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._table = self._whole.tolist()
        *tokens, count, goes_on, first = self._table[slot]
        return tokens[:count], bool(goes_on), None if first == NEVER else first


class Stepper:
    """Greedy generation in slots with a causal language model, one of this project or of transformers.

    Args:
        room_tokens: most tokens of a text, prompt and answer together.
        not_early: tokens that are not chosen before an answer has its fewest tokens.
        fused: the model's fused blocks, for a single slot without drafts; None runs the model itself.
        drafts: most draft tokens in each step, for a model of this project without sliding windows.
        read: prefills prompts, one at a time and without chunks; None lets the model itself read them.
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
        self._read = read
        room_tokens += drafts  # the last step may verify tokens beyond the end of the answer
        self.cache = SlotCache(slots=slots, room_tokens=room_tokens, sliding_windows=windows, device=device)
        # the texts so far, in which drafts are looked up; slots that are done write into one more column
        self._text_BR = torch.zeros(slots, room_tokens + 1 if drafts else 0, dtype=torch.int64, device=device)
        integers: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self._ends, self._not_early = (torch.tensor(sorted(set(each)), **integers) for each in (end_tokens, not_early))
        self._token_B1 = torch.zeros(slots, 1, **integers)
        self._goes_on_B = torch.zeros(slots, dtype=torch.bool, device=device)
        # `_looked_B` is the number of tokens at the last look
        self._count_B, self._budget_B, self._fewest_B, self._looked_B = (
            torch.zeros(slots, **integers) for _ in range(4)
        )
        self._steps_since_look = 0
        # slots that are done write into one more column
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
        piece_tokens: int | None = None,
    ) -> None:
        """Prefills prompts of at least one token into as many free slots. If memory runs out, none of them has begun.

        The prefill reads all but the last token of a prompt. The next step reads the last one and chooses the answer's
        first token. The last `answered_tokens` of each prompt already belong to its answer. The model reads at most
        `piece_tokens` of a prompt at once, None for whole prompts.
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
            piece_tokens = None
        for begin in range(0, longest, piece_tokens or max(1, longest)):
            piece = ids_NL[:, begin : begin + (piece_tokens or longest)]
            with self.cache.fill(slots_N, length_N, begin):
                if self._read is None:
                    self._model.base_model(input_ids=piece, past_key_values=self.cache, use_cache=True)
                else:
                    self._read(piece, self.cache)
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
        self._goes_on_B[slots_N] = True

    @torch.no_grad()
    def run(self, steps: int) -> None:
        """Takes decode steps, each of which adds one or more tokens to every text that goes on."""
        self._steps_since_look += steps
        if self._graph is not None:
            for _ in range(steps):
                self._graph.replay()
            return
        with attending_to(self.cache, self._model):
            for _ in range(steps):
                self._step()

    def written(self) -> Written:
        """Returns the tokens since the last look, without waiting for the device."""
        unused = self._written_BW.shape[1] - 1
        most = min(unused, self._steps_since_look * (1 + self._drafts))
        place_BM = self._looked_B[:, None] + torch.arange(most, device=self._looked_B.device)
        new_BM = self._written_BW.gather(1, place_BM.clamp_max(unused))
        written = Written(new_BM, self._count_B - self._looked_B, self._goes_on_B, self._watch)
        self._looked_B.copy_(self._count_B)
        self._steps_since_look = 0
        return written

    def drop(self, slot: int) -> None:
        """Ends a text before it has used up its budget."""
        self._goes_on_B[slot] = False
        self.cache.position_B[slot] = 0

    @torch.no_grad()
    def capture(self, graph_capture: GraphCapture) -> None:
        """Captures a step as a CUDA graph; call it while all slots are free, so that the step has no effect."""
        if graph_capture.possible:
            with attending_to(self.cache, self._model):
                self._graph = graph_capture.graph_of(self._whole_step, self._token_B1.device)

    @torch.no_grad()
    def try_step(self) -> Tensor:
        """Returns the logits [B, V] in fp32 of the next step, without choosing a token."""
        with attending_to(self.cache, self._model):
            return self._logits(self._token_B1)[:, 0]

    def _logits(self, token_BT: Tensor) -> Tensor:
        """Returns the logits [B, T, V] in fp32 after each of these tokens, the newest token and its drafts."""
        new = token_BT.shape[1]
        self.cache.begin_step(new)
        if self._fused is not None:
            return self._fused.logits(token_BT, self.cache, self._rope).float()[:, None]
        rope = {} if self._rope is None else {"rope_frequencies": self._rope}
        position_BT = self.cache.position_B[:, None].long() + torch.arange(new, device=token_BT.device)
        caching = {"past_key_values": self.cache, "use_cache": True}
        logits_BTV: Tensor = self._model(input_ids=token_BT, position_ids=position_BT, **caching, **rope).logits.float()
        return logits_BTV

    def _looked_up(self) -> Tensor:
        """Returns drafts [B, drafts]: the tokens that followed the newest two at their last place in the text.

        If there is no such place, the drafts are arbitrary tokens, which the step verifies like any others.
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
        taken_B = self._goes_on_B.clone()
        for place in range(token_BT.shape[1]):
            if place:
                taken_B = taken_B & self._goes_on_B & (self._token_B1[:, 0] == token_BT[:, place])
            self._take(logits_BTV[:, place], taken_B)
        self.cache.position_B.mul_(self._goes_on_B)

    def _whole_step(self) -> None:
        """Takes a step; if it raises, no tensor of the step stays referenced."""
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
        self._goes_on_B &= ~(ended_B | none_B) & (self._count_B < self._budget_B)
        self._token_B1.copy_(torch.where(taken_B[:, None], chosen_B1, self._token_B1))


def _rope(model: Any) -> RopeFrequencies | None:
    """Returns the model's RoPE frequencies on its device, None for models of transformers and without RoPE."""
    if not isinstance(model, SbevalForCausalLM) or model.config.rope_parameters is None:
        return None
    # the length 1 is arbitrary: if frequencies depend on the length, the model holds those of the request
    frequencies = model.model.held_rope_frequencies or model.model.rope_frequencies_for(1)
    return RopeFrequencies(frequencies.inv_freq.to(model.device), frequencies.attention_factor)
