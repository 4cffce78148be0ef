"""The lock that keeps exporting and tracing to one thread at a time."""

import threading

TRACING = threading.RLock()
"""torch.export keeps process-wide modes, and torch2jax replaces `torch.Tensor.__new__`
while it traces: two traces at once leave it replaced for good. While one runs,
`torch.Tensor(…)` raises in other threads, so trace before starting them."""
