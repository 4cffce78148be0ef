"""A torch teacher that runs beside the step: in a thread of its own, a batch ahead.

For teachers that cannot be lowered, or should not be: quantised ones, those with
kernels or code of their own. The thread runs the module without gradients on each batch
and hands logits, or the top k with the mass of the rest, over by DLPack. At most
`prefetch` batches are with the teacher or waiting, so a slow trainer holds it back. An
error in the thread is raised where the batch would have come.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from types import TracebackType

import jax
import numpy as np
import torch

from dew.bridges.dlpack import ALIGNMENT, to_jax
from dew.bridges.lowering.lock import TRACING
from dew.bridges.lowering.programs import example_tensors
from dew.bridges.lowering.torch_export import BLOCK, FINAL, Capture, capture_points
from dew.bridges.names import torch_inputs
from dew.objectives.distillation.teachers import (
    IDS,
    LOG_PROBS,
    LOGITS,
    TAIL,
    PrecomputedTeacher,
    hidden_name,
)
from dew.typing import Batch


@dataclass(frozen=True, kw_only=True)
class LiveTeacher:
    """How a torch module scores batches; `scored` runs it over a stream of them.

    `inputs` are the names of the batch's arrays that the module gets. With `top_k` only
    the likeliest classes are handed over, at `temperature`, with the log of the mass of
    the others. `layers` count the module's blocks, negative ones from the last; their
    outputs, before any final norm, come as `teacher_hidden_0` and so on. The number of
    blocks itself means what the head reads, after the final norm. In a distillation,
    `teacher` reads what this one wrote::

        live = LiveTeacher(module=model, top_k=64)
        objective = Distillation(student=…, teacher=live.teacher, …)
        with live.scored(batches) as stream:
            trainer.fit(stream)
    """

    module: torch.nn.Module
    inputs: tuple[str, ...] = ("tokens", "mask", "positions")
    top_k: int | None = None
    temperature: float = 1.0
    layers: tuple[int, ...] = ()
    prefetch: int = 2

    def __post_init__(self) -> None:
        faults = []
        if self.top_k is not None and self.top_k < 1:
            faults.append(f"top_k must be None or at least 1, got {self.top_k}")
        if self.prefetch < 1:
            faults.append(f"prefetch must be at least 1, got {self.prefetch}")
        if not self.temperature > 0:
            faults.append(f"temperature must be > 0, got {self.temperature}")
        if faults:
            raise ValueError("LiveTeacher: " + "; ".join(faults))

    @property
    def teacher(self) -> PrecomputedTeacher:
        """What an objective takes as its teacher, to read these scores."""
        if self.top_k is None:
            return PrecomputedTeacher(
                policy="logits", layers=self.layers, widths=self._widths
            )
        return PrecomputedTeacher(
            policy="top_k",
            temperature=self.temperature,
            top=self.top_k,
            layers=self.layers,
            widths=self._widths,
        )

    @property
    def _widths(self) -> tuple[int, ...]:
        """Of the layers' states, found by running two tokens."""
        if not self.layers:
            return ()
        said = self.score({"tokens": np.zeros((1, 2), np.int32)})
        places = range(len(self.layers))
        return tuple(said[hidden_name(place)].shape[-1] for place in places)

    def score(self, batch: Batch) -> Batch:
        """Returns the batch with what the teacher says of it, here and now."""
        given = {n: batch[n] for n in self.inputs if batch.get(n) is not None}
        named = torch_inputs(self.module, given)
        empty = example_tensors(self.module, named)
        tensors = {
            # A copy: the batch stays the caller's, and may be read-only.
            name: torch.from_numpy(np.array(named[name])).to(empty[name])
            for name in named
        }
        wrapper = Capture(self.module, capture_points(self.module))
        with torch.inference_mode():
            found = wrapper(tensors)
            scores = self._scores_from_logits(found.get("logits", found.get("output")))
            blocks = [v for n, v in found.items() if n.startswith(BLOCK)]
            hidden = {
                hidden_name(place): _to_jax(_layer_output(found, blocks, layer))
                for place, layer in enumerate(self.layers)
            }
        return {**batch, **scores, **hidden}

    def _scores_from_logits(self, logits: torch.Tensor | None) -> dict[str, jax.Array]:
        if logits is None:
            raise ValueError(
                f"{type(self.module).__name__} gives no logits for a student to learn; "
                "a live teacher is a model with a head"
            )
        if self.top_k is None:
            return {LOGITS: _to_jax(logits)}
        scaled = torch.log_softmax(logits.float() / self.temperature, dim=-1)
        kept, ids = scaled.topk(self.top_k, dim=-1)
        rest = scaled.scatter(-1, ids, float("-inf"))
        return {
            IDS: _to_jax(ids.to(torch.int32)),
            LOG_PROBS: _to_jax(kept),
            TAIL: _to_jax(torch.logsumexp(rest, dim=-1)),
        }

    def scored(self, batches: Iterable[Batch]) -> "Scoring":
        """Starts scoring a stream of batches, in order, `prefetch` ahead.

        The module must not be used elsewhere meanwhile. Trace and lower other models
        before, or in between batches: see `dew.bridges.lowering.lock`.
        """
        return Scoring(self, batches)


def _layer_output(
    found: Mapping[str, torch.Tensor], blocks: Sequence[torch.Tensor], layer: int
) -> torch.Tensor:
    count = len(blocks)
    if layer == count and FINAL in found:
        return found[FINAL]
    if not -count <= layer < count:
        raise ValueError(
            f"layers names {layer}; this teacher has {count} blocks, so it must be "
            f"from {-count} to {count}"
        )
    return blocks[layer]


def _to_jax(tensor: torch.Tensor) -> jax.Array:
    """Hands over a tensor of this call's own; where it lies badly, as a copy."""
    dense = tensor.contiguous()
    return to_jax(dense, copy=dense.data_ptr() % ALIGNMENT != 0)


class Scoring(Iterator[Batch]):
    """The stream of scored batches; a context manager that ends its thread.

    `waited_s` sums the seconds that the consumer waited for the teacher.
    """

    def __init__(self, teacher: LiveTeacher, batches: Iterable[Batch]) -> None:
        self.waited_s = 0.0
        self._teacher, self._batches, self._taken = teacher, iter(batches), 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="teacher")
        self._ahead: deque[Future[Batch]] = deque()
        self._fill()

    def _fill(self) -> None:
        """Hands the thread as many batches as may be ahead."""
        room = self._teacher.prefetch - len(self._ahead)
        for batch in islice(self._batches, room):
            self._ahead.append(self._pool.submit(self._score, batch))

    def _score(self, batch: Batch) -> Batch:
        # Not while another thread traces; see `dew.bridges.lowering.lock`.
        with TRACING:
            return self._teacher.score(batch)

    def __next__(self) -> Batch:
        if not self._ahead:
            self.close()
            raise StopIteration
        future = self._ahead.popleft()
        started = time.perf_counter()
        error = future.exception()
        self.waited_s += time.perf_counter() - started
        if error is not None:
            self.close()
            raise RuntimeError(
                f"the teacher failed on batch {self._taken}: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._taken += 1
        self._fill()
        return future.result()

    def close(self) -> None:
        """Ends the thread after the batch it is at; what it made is dropped."""
        self._batches = iter(())
        self._ahead.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Scoring":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
