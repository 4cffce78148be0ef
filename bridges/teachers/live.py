"""A torch teacher that runs beside the train step, in a thread and a batch ahead.

It serves teachers that cannot or should not be lowered: quantised models and those with
custom kernels or code. The thread runs the module without gradients on each batch and
passes logits, or the top k with the mass of the rest, to JAX by DLPack. At most
`prefetch` batches are in scoring or waiting, so a slow trainer slows the teacher. An
error in the thread is raised when its batch is requested.
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
    """A torch module that scores batches, one at a time or as a stream.

    `inputs` are the names of the batch's arrays that the module receives. With `top_k`
    only the likeliest classes are returned (all where there are fewer), at
    `temperature`, with the log of the mass of the others. `layers` are indices of the
    module's blocks, negative ones from the last; their outputs, before any final norm,
    are returned as `teacher_hidden_0` and so on. The number of blocks itself means the
    head's input, after the final norm. In a distillation, `teacher` reads these scores
    from the batch::

        live = LiveTeacher(module=model, top_k=64)
        objective = Distillation(student=…, teacher=live.teacher, …)
        with live.score_stream(batches) as stream:
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
        """The teacher for an objective, which reads these scores from a batch."""
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
        """Widths of the layers' hidden states, from a forward pass of two tokens."""
        if not self.layers:
            return ()
        scores = self.score({"tokens": np.zeros((1, 2), np.int32)})
        places = range(len(self.layers))
        return tuple(scores[hidden_name(place)].shape[-1] for place in places)

    def score(self, batch: Batch) -> Batch:
        """Returns the batch with the teacher's scores, computed in this thread.

        Raises:
            ValueError: the module returns no logits, or `layers` names a block that it
                does not have.
        """
        present = {n: batch[n] for n in self.inputs if batch.get(n) is not None}
        arguments = torch_inputs(self.module, present)
        empty = example_tensors(self.module, arguments)
        tensors = {
            # A copy: the batch stays the caller's, and may be read-only.
            name: torch.from_numpy(np.array(arguments[name])).to(empty[name])
            for name in arguments
        }
        wrapper = Capture(self.module, capture_points(self.module))
        with torch.inference_mode():
            outputs = wrapper(tensors)
            logits = outputs.get("logits", outputs.get("output"))
            scores = self._scores_from_logits(logits)
            blocks = [v for n, v in outputs.items() if n.startswith(BLOCK)]
            hidden = {
                hidden_name(place): _to_jax(_layer_output(outputs, blocks, layer))
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
        top, ids = scaled.topk(min(self.top_k, scaled.shape[-1]), dim=-1)
        rest = scaled.scatter(-1, ids, float("-inf"))
        return {
            IDS: _to_jax(ids.to(torch.int32)),
            LOG_PROBS: _to_jax(top),
            TAIL: _to_jax(torch.logsumexp(rest, dim=-1)),
        }

    def score_stream(self, batches: Iterable[Batch]) -> "Scoring":
        """Starts scoring a stream of batches, in order, `prefetch` ahead.

        The module must not be used elsewhere meanwhile. Other models are to be traced
        and lowered before it, or between batches; `dew.bridges.lowering.lock` has the
        reason.
        """
        return Scoring(self, batches)


def _layer_output(
    outputs: Mapping[str, torch.Tensor], blocks: Sequence[torch.Tensor], layer: int
) -> torch.Tensor:
    count = len(blocks)
    if layer == count and FINAL in outputs:
        return outputs[FINAL]
    if not -count <= layer < count:
        raise ValueError(
            f"layers names {layer}; this teacher has {count} blocks, so it must be "
            f"from {-count} to {count}"
        )
    return blocks[layer]


def _to_jax(tensor: torch.Tensor) -> jax.Array:
    """Shares a tensor of the current call with JAX, or copies it if misaligned."""
    dense = tensor.contiguous()
    return to_jax(dense, copy=dense.data_ptr() % ALIGNMENT != 0)


class Scoring(Iterator[Batch]):
    """A stream of batches scored in a thread, which leaving the context ends.

    `waited_s` is the number of seconds that the consumer waited for the teacher.
    """

    def __init__(self, teacher: LiveTeacher, batches: Iterable[Batch]) -> None:
        self.waited_s = 0.0
        self._teacher, self._batches, self._count = teacher, iter(batches), 0
        # One worker: scores come in the order of the batches, and the module runs one
        # forward pass at a time.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="teacher")
        self._ahead: deque[Future[Batch]] = deque()
        self._fill()

    def _fill(self) -> None:
        """Submits batches until `prefetch` of them are in scoring or waiting.

        The consumer's thread reads them, so an iterator of batches needs no lock, and
        the bound on futures is the bound on batches held in memory.
        """
        room = self._teacher.prefetch - len(self._ahead)
        for batch in islice(self._batches, room):
            self._ahead.append(self._pool.submit(self._score, batch))

    def _score(self, batch: Batch) -> Batch:
        # A trace in another thread replaces `torch.Tensor.__new__`, which the module
        # may call; see `dew.bridges.lowering.lock`.
        with TRACING:
            return self._teacher.score(batch)

    def __next__(self) -> Batch:
        if not self._ahead:
            self.close()
            raise StopIteration
        future = self._ahead.popleft()
        start = time.perf_counter()
        error = future.exception()
        self.waited_s += time.perf_counter() - start
        if error is not None:
            self.close()
            raise RuntimeError(
                f"the teacher failed on batch {self._count}: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._count += 1
        # Refilled before the result is returned, so that the teacher runs during the
        # train step on this batch.
        self._fill()
        return future.result()

    def close(self) -> None:
        """Ends the thread after its current batch; scores not yet read are dropped."""
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
