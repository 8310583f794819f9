"""Makes the KV caches of a run, one for each text."""

import contextlib
import dataclasses
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor
from transformers import Cache, DynamicCache, QuantizedCache, StaticCache

from sbeval.caches.choice import (
    BITS,
    PACKAGES,
    RESIDUAL_TOKENS,
    Backend,
    CacheChoice,
    function_of,
    function_sha256,
    group_for,
    package_version,
)
from sbeval.caches.suited import why_unsuited
from sbeval.checkpoints.facts import text_config
from sbeval.checkpoints.versions import check_transformers
from sbeval.errors import UserError, first_line

OLDEST_TRANSFORMERS_OF_QUANTIZED = (5, 20)
"""Before, a quantized cache counted each update as one token, and read chunks as long as its residual unrounded."""
_AXES: dict[Backend, int] = {"hqq": 1, "quanto": 0}
"""The axis with which each backend forms groups of consecutive channels of one head at one position."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheBuilder:
    """Makes empty caches for a model.

    Attributes:
        choice: the user's choice.
        model: the model.
        chunk_tokens: number of tokens that a scorer reads at once behind the context, so that the scores are those of
            decoding token by token; None for any number.
        group: numbers that share a scale and a zero point; None if nothing is quantized.
        backend: the package that quantizes; None if nothing is quantized.
        residual_tokens: newest tokens that a quantized cache holds in full precision, at most.
        make_cache: the user's function, which takes the model and returns an empty cache; None for other caches.
        function_sha256: SHA-256 of the file of this function; None for other caches, or if there is no such file.
    """

    choice: CacheChoice
    model: Any
    chunk_tokens: int | None
    group: int | None = None
    backend: Backend | None = None
    residual_tokens: int | None = None
    make_cache: Callable[[Any], Any] | None = None
    function_sha256: str | None = None

    @classmethod
    def of(cls, model: Any, choice: CacheChoice, *, chunk_tokens: int | None = None) -> Self:
        """Returns the builder of a model's caches.

        Args:
            model: the model.
            choice: the user's choice.
            chunk_tokens: the number of tokens that are read at once through the cache of a function; None for 1.

        Raises:
            UserError: the cache does not suit the model or the machine, or a package is missing.
        """
        if chunk_tokens is not None and choice.kind != "function":
            raise UserError(
                f"cache_chunk={chunk_tokens} is only for cache=MODULE:FUNCTION, found cache={choice}: remove "
                "cache_chunk from --model_args."
            )
        _check_model(model, choice)
        if choice.kind == "function":
            builder = cls(
                choice=choice,
                model=model,
                chunk_tokens=chunk_tokens or 1,
                make_cache=function_of(choice),
                function_sha256=function_sha256(choice),
            )
        elif choice.kind == "quantized":
            config = text_config(model.config)
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            builder = cls(
                choice=choice,
                model=model,
                chunk_tokens=RESIDUAL_TOKENS,
                group=group_for(choice, int(head_dim)),
                backend=_backend(choice),
                residual_tokens=RESIDUAL_TOKENS,
            )
        else:
            builder = cls(choice=choice, model=model, chunk_tokens=None)
        builder.make(1)
        return builder

    def with_chunk(self, chunk_tokens: int | None) -> Self:
        """Returns a builder whose caches are read in chunks of this many tokens."""
        return dataclasses.replace(self, chunk_tokens=chunk_tokens)

    def with_residual(self, residual_tokens: int) -> Self:
        """Returns a builder of quantized caches with another residual; other caches stay as they are."""
        if self.residual_tokens is None:
            return self
        return dataclasses.replace(self, chunk_tokens=residual_tokens, residual_tokens=residual_tokens)

    def make(self, length_tokens: int) -> Cache:
        """Returns an empty cache for a text of at most this many tokens.

        Raises:
            UserError: transformers or the user's function does not make a cache for this model.
        """
        try:
            cache = self._made(length_tokens)
        except Exception as error:  # the user's function can raise anything
            raise UserError(
                f"No cache={self.choice} for {type(self.model).__name__} ({first_line(error)}): use another cache, or "
                "remove cache from --model_args."
            ) from error
        if not isinstance(cache, Cache):
            raise UserError(
                f"Expected cache={self.choice} to return a transformers.Cache, found {type(cache).__name__}: correct "
                "the function."
            )
        with self.explaining():
            held = int(cache.get_seq_length())
        if held:
            raise UserError(
                f"Expected cache={self.choice} to return an empty cache, found one with {held} tokens: return a new "
                "cache in each call."
            )
        return cache

    @contextlib.contextmanager
    def explaining(self, *, only_cache: bool = False) -> Iterator[None]:
        """Inside this context, an error while the model reads through a cache becomes a `UserError`.

        Errors for users and those of exhausted memory stay as they are.

        Args:
            only_cache: whether only errors from code of the cache do, not those from the model's, such as wrong shapes.
        """
        try:
            yield
        except (UserError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the user's class can raise anything
            if should_reduce_batch_size(error) or (only_cache and not self._raised(error)):
                raise
            remedy = "correct the function" if self.make_cache is not None else "use another cache"
            raise UserError(
                f"cache={self.choice} cannot be read with {type(self.model).__name__} ({first_line(error)}): {remedy}."
            ) from error

    def _raised(self, error: Exception) -> bool:
        """Whether code of the cache is on the way to an error: transformers' caches, or the user's module."""
        modules = {"transformers.cache_utils", str(self.choice.function).partition(":")[0]}
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        return any(frame.f_globals.get("__name__") in modules for frame in frames)

    def _made(self, length_tokens: int) -> Any:
        config = self.model.config
        if self.make_cache is not None:
            return self.make_cache(self.model)
        if self.choice.kind == "static":
            return StaticCache(config=config, max_cache_len=length_tokens)
        if self.choice.kind == "offloaded":
            return DynamicCache(config=config, offloading=True)
        assert self.backend is not None
        axis = _AXES[self.backend]
        if self.backend == "quanto":
            _unpack_without_compiler()
        return QuantizedCache(
            self.backend,
            config,
            nbits=self.choice.bits,
            axis_key=axis,
            axis_value=axis,
            q_group_size=self.group,
            residual_length=self.residual_tokens,
        )

    def facts(self) -> dict[str, Any]:
        """Returns the cache's settings for the results file."""
        facts: dict[str, Any] = {"cache": str(self.choice), "chunk_tokens": self.chunk_tokens}
        if self.make_cache is not None:
            facts["function_sha256"] = self.function_sha256
        if self.backend is not None:
            package = PACKAGES[self.backend]
            facts |= {
                "backend": self.backend,
                "backend_version": package_version(package),
                "bits": self.choice.bits,
                "group": self.group,
                "residual_length_tokens": self.residual_tokens,
            }
        return facts


def _unpack_without_compiler() -> None:
    """Lets quanto unpack bits on a CPU with torch's operations.

    Its own C++ extension has the same result, but is compiled at its first use, for half a minute.
    """
    from optimum.quanto.library.extensions.extension import get_extension  # an optional dependency

    extension = get_extension("quanto_cpp")
    if extension._lib is None:
        extension._lib = types.SimpleNamespace(unpack=unpacked)


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Returns the numbers [8 / bits * N, ...] of `bits` bits in `packed` [N, ...], those in the lowest bits first."""
    return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])


def _backend(choice: CacheChoice) -> Backend:
    able: list[Backend] = [backend for backend in BITS if choice.bits in BITS[backend]]
    wanted = [choice.backend] if choice.backend else able
    for backend in wanted:
        if package_version(PACKAGES[backend]) is not None:
            return backend
    packages = " or ".join(PACKAGES[backend] for backend in wanted)
    raise UserError(f"cache={choice} needs {packages}, which is not installed: run `pip install 'sbeval[cache]'`.")


def _check_model(model: Any, choice: CacheChoice) -> None:
    if why := why_unsuited(getattr(model, "config", None), choice):
        raise UserError(f"{why}.")
    if choice.kind == "quantized":
        check_transformers(OLDEST_TRANSFORMERS_OF_QUANTIZED, f"cache={choice}", remedy="use another cache")
    if choice.kind == "offloaded" and model.device.type != "cuda":
        raise UserError(
            f"cache=offloaded moves the cache of a GPU to the CPU, but the model is on {model.device}: pass "
            "device=cuda, or remove cache from --model_args."
        )
