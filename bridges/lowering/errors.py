"""Errors of lowering; each message has the cause and the remedy."""


class LoweringError(ValueError):
    """A torch module cannot be lowered to a JAX function as it is."""


class LoweringExportError(LoweringError):
    """`torch.export` could not make one graph of the module."""


class MissingOpsError(LoweringError):
    """The graph calls torch ops that have no JAX implementation."""


class LoweringShapeError(LoweringError):
    """An op returned another shape than the same op in torch."""


class LoweringParityError(LoweringError):
    """The lowered function and the torch module differ on the same inputs."""
