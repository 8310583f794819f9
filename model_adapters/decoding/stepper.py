"""A model and the slots it generates in: prompts are read into free slots, and a step adds one token to each.

What a step needs lies on the device: the newest tokens, how many there are, which slots go on. So a step can be
recorded as a CUDA graph and replayed without the host, which only looks at what was written from time to time. A slot
without a text takes part in every step, with nothing to attend to.

Shape suffixes: B slots, N prompts, L tokens of the longest prompt, V vocabulary, W most new tokens.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from sbeval.model_adapters.batching import out_of_memory
from sbeval.model_adapters.decoding.fused_blocks import FusedBlocks
from sbeval.model_adapters.decoding.transformers_attention import attending_to
from sbeval.models import RopeFrequencies, SbevalForCausalLM
from sbeval.models.slots import SlotCache
from sbeval.scoring.non_finite import NEVER, FiniteWatch

logger = logging.getLogger(__name__)


class Written:
    """What slots held at one time, on its way to the host.

    Args:
        written_BW: tokens generated in each slot.
        count_B: how many they are.
        goes_on_B: whether no end token came yet, and the budget is not spent.
        watch: says how many tokens stood before logits that are none.
    """

    def __init__(self, written_BW: Tensor, count_B: Tensor, goes_on_B: Tensor, watch: FiniteWatch) -> None:
        columns = (count_B, goes_on_B, watch.first_B)
        whole = torch.cat([written_BW, *(column[:, None] for column in columns)], dim=1)
        self._arrived: torch.cuda.Event | None = None
        self._table: list[list[int]] | None = None
        self._whole = whole
        if whole.is_cuda:
            self._whole = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True).copy_(whole, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(whole.device))

    def of(self, slot: int) -> tuple[list[int], bool, int | None]:
        """Returns a slot's tokens, whether its text goes on, and how many tokens stood before logits that are none.

        It waits until they are there.
        """
        if self._table is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._table = self._whole.tolist()
        *tokens, count, goes_on, first = self._table[slot]
        return tokens[:count], bool(goes_on), None if first == NEVER else first


def sliding_windows(model: Any) -> list[int | None] | None:
    """Returns each layer's window, None for layers that see everything; None where some keep more than keys."""
    try:
        layers = DynamicCache(config=model.config).layers
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    if not layers or any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        return None
    return [getattr(layer, "sliding_window", None) for layer in layers]


class Stepper:
    """Greedy generation in slots.

    Args:
        model: a causal language model, of this family or of transformers.
        slots: how many texts there is room for.
        room_tokens: most tokens of a text, prompt and answer.
        most_new_tokens: most tokens of an answer.
        end_tokens: tokens that end an answer.
        fewest_new_tokens: of an answer, before which no end token is chosen.
        fused: the model's blocks, for a single slot; None runs the model as it is.
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        room_tokens: int,
        most_new_tokens: int,
        end_tokens: Sequence[int] = (),
        fewest_new_tokens: int = 0,
        fused: FusedBlocks | None = None,
    ) -> None:
        windows = sliding_windows(model)
        assert windows is not None
        device = model.device
        self._model, self._fewest, self._fused = model, fewest_new_tokens, fused
        self.cache = SlotCache(slots=slots, room_tokens=room_tokens, sliding_windows=windows, device=device)
        self._ends = torch.tensor(sorted(set(end_tokens)), dtype=torch.int64, device=device)
        self._token_B1 = torch.zeros(slots, 1, dtype=torch.int64, device=device)
        self._goes_on_B = torch.zeros(slots, dtype=torch.bool, device=device)
        self._count_B = torch.zeros(slots, dtype=torch.int64, device=device)
        self._budget_B = torch.zeros(slots, dtype=torch.int64, device=device)
        # one column more, for slots that are done
        self._written_BW = torch.zeros(slots, most_new_tokens + 1, dtype=torch.int64, device=device)
        self._watch = FiniteWatch(slots, device)
        self._rope = _rope(model)
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def start(self, slots: Sequence[int], prompts: Sequence[NDArray[np.int64]], budgets_tokens: Sequence[int]) -> None:
        """Reads prompts into free slots. Where memory runs out, nothing has begun.

        All but the last token of a prompt are read here, and that one by the next step, which chooses the first token
        of the answer.

        Args:
            slots: one a prompt.
            prompts: tokens, at least one each.
            budgets_tokens: most tokens of each answer.
        """
        device = self._token_B1.device
        longest = max(len(prompt) for prompt in prompts) - 1
        input_ids = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            input_ids[row, : len(prompt) - 1] = prompt[:-1]
        numbers = [
            [len(prompt) - 1, int(prompt[-1]), budget] for prompt, budget in zip(prompts, budgets_tokens, strict=True)
        ]
        length_N, last_N, budget_N = torch.tensor(numbers, dtype=torch.int64).T.contiguous().to(device)
        slots_N = torch.tensor(slots, dtype=torch.int64, device=device)
        if longest:
            with self.cache.fill(slots_N, length_N):
                body = self._model.base_model
                body(input_ids=torch.from_numpy(input_ids).to(device), past_key_values=self.cache, use_cache=True)
        self.cache.position_B[slots_N] = length_N.int()
        self._token_B1[slots_N, 0] = last_N
        self._budget_B[slots_N] = budget_N
        self._count_B[slots_N] = 0
        self._watch.begin(slots_N)
        self._goes_on_B[slots_N] = True

    @torch.no_grad()
    def run(self, steps: int) -> None:
        """Adds up to this many tokens to each text that goes on."""
        if self._graph is not None:
            for _ in range(steps):
                self._graph.replay()
            return
        with attending_to(self.cache, self._model):
            for _ in range(steps):
                self._step()

    def written(self) -> Written:
        """Returns what is written once the steps so far are done, without waiting for them."""
        return Written(self._written_BW[:, :-1], self._count_B, self._goes_on_B, self._watch)

    def drop(self, slot: int) -> None:
        """Ends a text before its budget is spent."""
        self._goes_on_B[slot] = False
        self.cache.position_B[slot] = 0

    @torch.no_grad()
    def capture(self) -> None:
        """Records a step as a CUDA graph; while no text is there, so that trying it out changes nothing.

        A model that cannot be recorded goes on without, and the log says so.
        """
        side = torch.cuda.Stream(self._token_B1.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(side.device))
        with torch.cuda.device(side.device), attending_to(self.cache, self._model):
            with torch.cuda.stream(side):
                self._step()  # kernels are compiled and libraries loaded outside a recording
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    self._step()
            except RuntimeError as error:
                if out_of_memory(error):
                    raise
                reason = str(error).strip().partition("\n")[0]
                logger.warning("steps cannot be recorded as a CUDA graph and run one by one: %s", reason)
                return
        self._graph = graph

    @torch.no_grad()
    def try_step(self) -> Tensor:
        """Returns the logits [B, V] in fp32 that the next step would choose from, and chooses nothing."""
        with attending_to(self.cache, self._model):
            return self._logits()

    def _logits(self) -> Tensor:
        self.cache.begin_step()
        if self._fused is not None:
            return self._fused.logits(self._token_B1, self.cache, self._rope).float()
        rope = {} if self._rope is None else {"rope_frequencies": self._rope}
        output = self._model(
            input_ids=self._token_B1,
            position_ids=self.cache.position_B[:, None].long(),
            past_key_values=self.cache,
            use_cache=True,
            **rope,
        )
        logits_BV: Tensor = output.logits[:, -1].float()
        return logits_BV

    def _step(self) -> None:
        logits_BV = self._logits()
        none_B = self._watch.note(logits_BV, self._count_B)
        if self._fewest and len(self._ends):
            early_B1 = (self._count_B < self._fewest)[:, None]
            of_ends = logits_BV[:, self._ends]
            logits_BV[:, self._ends] = of_ends.masked_fill(early_B1, -torch.inf)
        chosen_B1 = logits_BV.argmax(-1, keepdim=True)
        unused = self._written_BW.shape[1] - 1
        place_B = torch.where(self._goes_on_B, self._count_B, unused)
        self._written_BW.scatter_(1, place_B[:, None], chosen_B1)
        self._count_B += self._goes_on_B
        ended_B = (chosen_B1 == self._ends).any(-1)
        self._goes_on_B &= ~(ended_B | none_B) & (self._count_B < self._budget_B)
        self._token_B1.copy_(chosen_B1)
        self.cache.position_B.add_(1).mul_(self._goes_on_B)


def _rope(model: Any) -> RopeFrequencies | None:
    """What a model of this family is told in each step: the frequencies in force, on its device."""
    if not isinstance(model, SbevalForCausalLM) or model.config.rope_parameters is None:
        return None
    # those of any length: where they depend on it, they are held
    frequencies = model.model.held_rope_frequencies or model.model.rope_frequencies_for(1)
    return RopeFrequencies(frequencies.inv_freq.to(model.device), frequencies.attention_factor)
